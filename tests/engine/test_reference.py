"""Real weights against Hugging Face transformers: all reference items in flight together, in several engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve import LLM
from tests.reference import PARAMS, assert_matches, load_items

LEAN = {"dtype": "float32", "slots": 16, "max_len": 1024, "accelerator": "cpu"}
ENGINES = {
    "plain": {},
    "preempted": {"page_size": 16},  # and the smallest pool there can be
    "chunk 16, page 16": {"prefill_chunk": 16, "prefill_tokens": 64, "page_size": 16},
    "batch invariant": {"batch_invariant": True},
}
MODELS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma3-270m"}
LONGEST = {"smollm2": 832, "gemma3": 448}  # prompt and output of the longest item, in whole pages


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
    small = {"max_len": LONGEST[name], "pool": str(LONGEST[name])} if engine == "preempted" else {}
    llm = run(shared, name, **ENGINES[engine], **small)
    if engine == "preempted":
        assert llm.engine.load().preemptions > 0
