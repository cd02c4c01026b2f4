"""Constrained rows on real weights, with lookup drafts and without: thirty-two requests with thirty-two schemas at
once, and sixteen beside sixteen plain ones.  Each draws what it draws alone, and nothing compiles.  SmolLM2, float32."""

from __future__ import annotations

import json

import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputs
from tests.engine.schemas import SCHEMAS, check_valid
from tests.engine.test_service_promises import check_idle

LEAN = {"dtype": "float32", "slots": 32, "max_len": 768, "pool": "24576", "accelerator": "cpu"}
ENGINES = {
    "no drafts": {},
    "ngram, K=4": {"draft": "ngram", "speculate_tokens": 4},
}
BOUND_PROMPTS = [f"A JSON schema:\n{json.dumps(schema)}\nAn example of it:\n" for schema in SCHEMAS.values()]
BOUND = [
    SamplingParams(
        temperature=number % 2, seed=number, max_tokens=400, structured_outputs=StructuredOutputs(json=schema)
    )
    for number, schema in enumerate(SCHEMAS.values())
]
PLAIN_PROMPTS = [f"A story about {what}. It was" for what in "abcdefghijklmnop"]
PLAIN = [SamplingParams(temperature=number % 2, seed=number, max_tokens=48, ignore_eos=True) for number in range(16)]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """The tokens of every request with no other beside it: the plain ones, then those with schemas."""
    with LLM(**LEAN) as llm:
        requests = zip(PLAIN_PROMPTS + BOUND_PROMPTS, PLAIN + BOUND, strict=True)
        return [llm.generate([prompt], params)[0].token_ids for prompt, params in requests]


@pytest.mark.full
@pytest.mark.parametrize("name", ENGINES)
def test_constrained_rows_are_valid_and_every_row_draws_what_it_draws_alone(
    alone: list[tuple[int, ...]], name: str
) -> None:
    with LLM(**(LEAN | ENGINES[name])) as llm:
        bound = llm.generate(BOUND_PROMPTS, BOUND)
        mixed = llm.generate(PLAIN_PROMPTS + BOUND_PROMPTS[::2], PLAIN + BOUND[::2])
        check_idle(llm)
        load = llm.engine.load()
    check_valid(bound)
    assert [output.token_ids for output in mixed[:16]] == alone[:16]
    assert [output.token_ids for output in bound] == alone[16:]
    assert [output.token_ids for output in mixed[16:]] == alone[16::2]
    assert load.compiles == 0
    accepted = sum(output.usage.accepted_tokens for output in bound)
    assert accepted > 0 or name == "no drafts", "no draft was accepted: this proves little"
