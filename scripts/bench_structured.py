"""Measure what structured output costs: constrained rows, plain rows beside them, and the host's part of it.

Every figure is a ratio to the same number of plain rows in the same run.  `python scripts/bench_structured.py
[--draft ngram] [--model ...] [--rows 16] [--tokens 64] [--output FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams, StructuredOutputs
from jaxserve.config import DEFAULT_MODEL
from jaxserve.request import Request
from jaxserve.text.masks import MaskFiller

PEOPLE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["name", "age", "tags"],
    },
}


def time_tokens(llm: LLM, each: Sequence[SamplingParams], tag: str) -> list[float]:
    """Seconds per output token of each request, all sent at once, from its first chunk to its last."""

    async def read(request: Request) -> float:
        times, tokens = [], []
        async for chunk in llm.engine.submit(request):
            times.append(time.perf_counter())
            tokens.append(len(chunk.token_ids))
        return (times[-1] - times[0]) / max(sum(tokens) - tokens[0], 1)

    async def run(requests: Sequence[Request]) -> list[float]:
        return await asyncio.gather(*map(read, requests))

    prompt = tuple(llm.tokenizer.encode("A list of people, as JSON: "))
    requests = [Request(id=f"{tag}-{i}", prompt_ids=prompt, params=params) for i, params in enumerate(each)]
    return asyncio.run(run([llm.engine.prepare(request) for request in requests]))


def time_masks(llm: LLM, params: SamplingParams, rows: int, drafts: int) -> float:
    """Seconds in which the host works out one step's masks: the time that must fit beside a forward call."""
    request = llm.engine.prepare(Request(id="masks", prompt_ids=(1,), params=params))
    assert request.make_mask is not None
    masks = [request.make_mask() for _ in range(rows)]
    filler = MaskFiller(-(-llm.engine.info.vocab // 32))
    answer = llm.tokenizer.encode("[" + '{"name": "Ada", "age": 36, "tags": ["x", 1]}, ' * 6)
    seconds = []
    for at, token_id in enumerate(answer):
        ahead = answer[at : at + drafts]
        began = time.perf_counter()
        filled = filler.fill([(mask, ahead) for mask in masks])
        seconds.append(time.perf_counter() - began)
        assert all(isinstance(words, np.ndarray) for words in filled), filled
        for mask in masks:
            mask.advance([token_id])
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft", default="none")
    parser.add_argument("--rows", type=int, default=16, help="constrained rows, and as many plain ones beside them")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    plain = SamplingParams(temperature=0.8, seed=1, max_tokens=args.tokens, ignore_eos=True)
    bound = replace(plain, structured_outputs=StructuredOutputs(json=PEOPLE))
    rows, drafts = args.rows, 0 if args.draft == "none" else 4
    runs = {
        f"{rows} plain": [plain] * rows,
        f"{rows} constrained": [bound] * rows,
        f"{2 * rows} plain": [plain] * (2 * rows),
        f"{rows} plain + {rows} constrained": [plain] * rows + [bound] * rows,
    }
    found: dict[str, list[float]] = {}
    with LLM(args.model, slots=2 * rows, max_len=1024, draft=args.draft) as llm:
        for repeat in range(args.repeats + 1):  # the first one warms up
            for name, each in runs.items():
                times = time_tokens(llm, each, f"{name} {repeat}")
                parts = (
                    {"": times}
                    if len(set(map(id, each))) == 1
                    else {" (plain)": times[:rows], " (bound)": times[rows:]}
                )
                for part, values in parts.items():
                    if repeat:
                        found.setdefault(name + part, []).append(statistics.median(values))
        host = time_masks(llm, bound, rows, drafts)
    best = {name: min(values) for name, values in found.items()}
    base = {
        name: best[f"{2 * rows if '+' in name or name.startswith(f'{2 * rows} ') else rows} plain"] for name in best
    }
    table = Table("rows", "ms per output token", "of as many plain rows", title=f"{args.model}, draft {args.draft}")
    for name, seconds in best.items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / base[name]:.2f}x")
    Console(width=120).print(table, f"masks of {rows} rows, {1 + drafts} positions each: {1e3 * host:.2f} ms a step")
    if args.output:
        args.output.write_text(json.dumps({"seconds_per_token": best, "mask_seconds": host}, indent=2) + "\n")


if __name__ == "__main__":
    main()
