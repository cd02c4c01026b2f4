"""The right answers on real weights (made with Hugging Face transformers), and the rule by which ours are held to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.llm import RequestOutput
from jaxserve.request import SamplingParams

GAP = 1e-2  # ids must be equal up to the first step whose top two were closer than this
LOGPROB_TOLERANCE = 2e-3
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)


@dataclass(frozen=True)
class Item:
    kind: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sure: int  # steps before the first one whose top two were closer than GAP; all when none was


def load_items(path: Path) -> list[Item]:
    items = []
    for raw in json.loads(path.read_text())["items"]:
        gaps = [top[0][1] - top[1][1] for top in raw["top5"]]
        close = [step for step, gap in enumerate(gaps) if gap < GAP]
        items.append(
            Item(
                kind=raw["kind"],
                prompt=raw["prompt"] if isinstance(raw.get("prompt"), str) else None,
                prompt_ids=tuple(raw["prompt_ids"]),
                output_ids=tuple(raw["output_ids"]),
                logprobs=tuple(raw["logprobs"]),
                sure=close[0] if close else len(gaps),
            )
        )
    return items


def assert_matches(items: Sequence[Item], outputs: Sequence[RequestOutput]) -> None:
    for number, (item, output) in enumerate(zip(items, outputs, strict=True)):
        assert len(output.token_ids) == 48
        assert output.token_ids[: item.sure] == item.output_ids[: item.sure], f"item {number} ({item.kind})"
        # Logprobs mean the same only while the tokens before them are the same.
        same = next((i for i, pair in enumerate(zip(output.token_ids, item.output_ids)) if pair[0] != pair[1]), 48)
        for step in range(same):
            error = abs(output.logprobs[step].logprob - item.logprobs[step])
            assert error < LOGPROB_TOLERANCE, f"item {number} ({item.kind}) step {step}: logprob off by {error}"
