"""Part `engine`: the packaged model served on the device in float32; its greedy ids are the CPU's."""

from __future__ import annotations

import jax

from jaxserve import LLM, SamplingParams

from . import Report

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a small boat that",
    "1, 1, 2, 3, 5, 8,",
    "The three states of water are",
    "Dear Sir or Madam,\n\n",
    "Q: Why is the sky blue?\nA:",
    "import numpy as np\n\n",
)
TIE = 1e-3  # a token may differ where the CPU's top two were closer than this; nothing after it is compared
ACCELERATOR = {"cuda": "gpu"}


def run(device: jax.Device, quick: bool) -> Report:  # pyright: ignore[reportInvalidTypeForm]
    report = Report("greedy ids of the packaged model, float32", ("prompt", "tokens equal", "of", ""))
    count = 16 if quick else 48
    wanted, got = (_generate(platform, count) for platform in ("cpu", device.platform))
    for prompt, expected, output in zip(PROMPTS, wanted, got, strict=True):
        pairs = zip(expected.token_ids, output.token_ids, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), count)
        verdict = "ok"
        if same < count:
            assert expected.logprobs is not None
            (_, first), (_, second) = expected.logprobs[same].top[:2]
            is_tie = first - second < TIE
            verdict = f"tie: top two {first - second:.1e} apart" if is_tie else "WRONG"
            if not is_tie:
                report.failures.append(f"{prompt!r} differs from the CPU at token {same}")
        report.rows.append((prompt.split("\n")[0][:40], same, count, verdict))
    return report


def _generate(platform: str, count: int):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2)
    with LLM(
        accelerator=ACCELERATOR.get(platform, platform), dtype="float32", slots=8, max_len=256, pool="2048"
    ) as llm:
        return llm.generate(list(PROMPTS), params)
