"""Real weights against Hugging Face transformers: all reference items in flight together, in several engines, and with
every kind of draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxserve import LLM
from jaxserve.llm import RequestOutput
from tests.engine.test_exactness import assert_same
from tests.reference import PARAMS, assert_matches, load_items

LEAN = {"dtype": "float32", "slots": 16, "max_len": 1024, "accelerator": "cpu"}
ENGINES = {
    "plain": {},
    "preempted": {"page_size": 16},  # and the smallest pool there can be
    "chunk 16, page 16": {"prefill_chunk": 16, "prefill_tokens": 64, "page_size": 16},
    "batch invariant": {"batch_invariant": True},
}
MODELS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma3-270m"}
DRAFTS = {
    "ngram": {"draft": "ngram", "speculate_tokens": 4},
    "ngram, auto": {"draft": "ngram"},
    "first layers": {"draft": "self:layers=8", "speculate_tokens": 3},
    "8 bits": {"draft": "self:int8", "speculate_tokens": 3},
    "4 bits": {"draft": "self:int4", "speculate_tokens": 3},
    "itself": {"draft": "model:smollm2-135m-instruct", "speculate_tokens": 3},
}
DRAFTED = [(name, draft) for name in MODELS for draft in DRAFTS if (name, draft) != ("gemma3", "itself")]
LONGEST = {"smollm2": 832, "gemma3": 448}  # prompt and output of the longest item, in whole pages


def run(shared: Path, name: str, **options) -> tuple[LLM, Sequence[RequestOutput]]:
    items = load_items(shared / "reference" / f"{name}.json")
    with LLM(MODELS[name], **(LEAN | options)) as llm:
        outputs = llm.generate([item.prompt_ids for item in items], PARAMS)
    assert_matches(items, outputs)
    return llm, outputs


def test_smollm2_gives_the_reference_tokens(shared: Path) -> None:
    """The one pass of the real model in the plain test run."""
    run(shared, "smollm2", batch_invariant=True)


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_reference_tokens_in_every_engine(shared: Path, name: str, engine: str) -> None:
    small = {"max_len": LONGEST[name], "pool": str(LONGEST[name])} if engine == "preempted" else {}
    llm, _ = run(shared, name, **ENGINES[engine], **small)
    if engine == "preempted":
        assert llm.engine.load().preemptions > 0


@pytest.fixture(scope="module")
def plain(shared: Path) -> dict[str, Sequence[RequestOutput]]:
    """Each model's answers without drafts."""
    return {name: run(shared, name)[1] for name in MODELS}


@pytest.mark.full
@pytest.mark.parametrize(("name", "draft"), DRAFTED)
def test_every_draft_gives_the_tokens_of_none(shared: Path, plain, name: str, draft: str) -> None:
    llm, outputs = run(shared, name, **DRAFTS[draft])
    assert_same(outputs, plain[name])
    load = llm.engine.load()
    assert "speculate_tokens" not in DRAFTS[draft] or load.accepted_tokens > 0
    if draft == "itself":
        assert load.accepted_tokens == load.draft_tokens
    print(f"{name}, {draft}: {load.accepted_tokens} of {load.draft_tokens} drafts accepted")
