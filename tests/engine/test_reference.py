"""Real weights against Hugging Face transformers: all reference items in flight together, in several engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve import LLM
from tests.reference import PARAMS, assert_matches, load_items

# One prefill shape and two decode shapes: what the pass must compile is what it uses.
LEAN = {"dtype": "float32", "slots": 16, "max_len": 1024, "accelerator": "cpu"}
ENGINES = {
    "plain": {},
    "preempted": {"pool": "1088", "max_len": 1024, "page_size": 32},
    "chunk 16, page 16": {"prefill_chunk": 16, "prefill_tokens": 64, "page_size": 16},
    "batch invariant": {"batch_invariant": True},
}
MODELS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma3-270m"}


def run(shared: Path, name: str, **options) -> LLM:
    items = load_items(shared / "reference" / f"{name}.json")
    with LLM(MODELS[name], **(LEAN | options)) as llm:
        assert_matches(items, llm.generate([item.prompt_ids for item in items], PARAMS))
    return llm


def test_smollm2_gives_the_reference_tokens(shared: Path) -> None:
    """The one pass of the real model in the plain test run."""
    run(shared, "smollm2", batch_invariant=True)


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_reference_tokens_in_every_engine(shared: Path, name: str, engine: str) -> None:
    llm = run(shared, name, **ENGINES[engine])
    if engine == "preempted":
        assert llm.engine.load().preemptions > 0
