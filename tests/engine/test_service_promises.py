"""Every request ends once, nothing compiles after the start, pages come back, masks arrive in time, failures are told."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jaxserve import LLM, RequestError, SamplingParams
from jaxserve.request import FinishReason, Request
from tests.engine.conftest import Engines


def random_params(rng: random.Random) -> SamplingParams:
    """Anything a request may ask for, in any mix."""
    maybe = lambda value, share=0.3: value if rng.random() < share else None  # noqa: E731
    fields = {
        "max_tokens": rng.choice([0, 1, 2, 5, 20, 60]),
        "temperature": rng.choice([0, 0, 0.7, 1.3]),
        "top_k": maybe(rng.randrange(0, 600)), "top_p": maybe(rng.uniform(0.1, 1)), "min_p": maybe(rng.random() * 0.3),
        "presence_penalty": maybe(rng.uniform(-2, 2)), "frequency_penalty": maybe(rng.uniform(-2, 2)),
        "repetition_penalty": maybe(rng.uniform(0.5, 2)), "seed": maybe(rng.getrandbits(63)),
        "logprobs": maybe(rng.randrange(0, 21)), "prompt_logprobs": maybe(rng.randrange(0, 21), 0.1),
        "n": maybe(rng.randrange(1, 4), 0.2), "ignore_eos": maybe(True), "logit_bias": maybe({rng.randrange(512): 5.0}),
        "banned_token_ids": maybe([rng.randrange(512)]), "stop": maybe([rng.choice(["a", "th", "\n", "of the"])]),
        "stop_token_ids": maybe([rng.randrange(512)]),
        "allowed_token_ids": maybe(rng.sample(range(512), 40), 0.1), "speculate": maybe(False),
    }  # fmt: skip
    params = SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    return replace(params, min_tokens=rng.choice([0, 0, params.max_tokens // 2]))


def check_idle(llm: LLM) -> None:
    deadline = time.monotonic() + 10
    while (load := llm.engine.load()).running + load.waiting and time.monotonic() < deadline:
        time.sleep(0.005)
    assert load.pages_held == 0
    assert load.pages_free + load.pages_cached == load.pages_total


def run_trace(llm: LLM, count: int, seed: str) -> None:
    """All parameters, lengths 1 to 600, aborts at random: nothing compiles, everything ends once, pages come back."""
    rng = random.Random(seed)
    handles = {}
    before = llm.engine.load()
    for number in range(count):
        prompt = tuple(rng.randrange(3, 400) for _ in range(min(int(10 ** rng.uniform(0, 2.8)), 600)))
        request = Request(
            id=f"{seed}-{number}", prompt_ids=prompt, params=random_params(rng), priority=rng.randrange(3)
        )
        handles[number] = llm.engine.submit(request)
        if rng.random() < 0.2:
            handles[rng.randrange(number + 1)].abort()
        if rng.random() < 0.1:
            time.sleep(0.02)
    for handle in handles.values():
        ended: list[int] = []
        counted: dict[int, int] = {}
        for chunk in handle:
            counted[chunk.index] = counted.get(chunk.index, 0) + len(chunk.token_ids)
            assert chunk.index not in ended, "a chunk after the last one"
            if chunk.finish_reason is not None:
                ended.append(chunk.index)
                assert chunk.finish_reason is not FinishReason.ERROR, chunk.error
                assert chunk.usage.completion_tokens == counted[chunk.index]
        assert sorted(ended) == list(range(handle.request.params.n))
    after = llm.engine.load()
    assert after.compiles == 0
    assert after.requests - before.requests == count
    check_idle(llm)


@pytest.mark.parametrize("pool", ["4096", "800"])
def test_random_trace_compiles_nothing_and_ends_everything_once(engines: Engines, pool: str) -> None:
    """A pool that is large, and one that preempts."""
    run_trace(engines(pool=pool, max_len=700, slots=8), 150, pool)


@pytest.mark.full
def test_a_thousand_random_requests_on_the_tiny_model(engines: Engines) -> None:
    run_trace(engines(pool="800", max_len=700, slots=8, queue_limit=4096), 1000, "a thousand")


@pytest.mark.full
def test_a_thousand_random_requests_on_real_weights() -> None:
    with LLM(slots=16, max_len=1024, pool="8192", queue_limit=4096, accelerator="cpu") as llm:
        run_trace(llm, 1000, "real weights")


class OnlyEvenAfterOdd:
    """A grammar of one rule: after an odd token only even ids may come."""

    def __init__(self) -> None:
        self.last = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        self.last = token_ids[-1]

    def rollback(self, count: int) -> None:
        raise NotImplementedError

    def words(self) -> bytes:
        allowed = np.ones(512, bool)
        if self.last % 2:
            allowed[1::2] = False
        return np.packbits(allowed, bitorder="little").tobytes()


def test_late_masks_hold_with_plain_rows_running_ahead(engines: Engines) -> None:
    llm = engines()
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=7)
    prompts = [tuple(range(5 + i, 25 + i)) for i in range(6)]
    plain = [output.token_ids for output in llm.generate(prompts, params)]
    handles = [
        llm.engine.submit(
            Request(id=f"mask-{i}", prompt_ids=prompt, params=params, make_mask=OnlyEvenAfterOdd if i % 2 else None)
        )
        for i, prompt in enumerate(prompts)
    ]
    for i, handle in enumerate(handles):
        token_ids = sum((chunk.token_ids for chunk in handle), ())
        assert len(token_ids) == 60
        if i % 2:
            assert all(b % 2 == 0 for a, b in zip((0, *token_ids), token_ids) if a % 2), "a mask came too late"
            assert token_ids != plain[i]
        else:
            assert token_ids == plain[i], "a mask reached a row that has none"


def test_abort_returns_pages_wherever_the_request_stands(engines: Engines) -> None:
    llm = engines()
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    for wait_for in (0, 1, 3):  # chunks read before the abort: queued or in prefill, first token, decoding
        handle = llm.engine.submit(Request(id=f"abort-{wait_for}", prompt_ids=tuple(range(3, 203)), params=params))
        for seen, chunk in enumerate(handle):
            if seen == wait_for:
                handle.abort()
            last = chunk
        assert last.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    check_idle(llm)


def test_deadline_ends_a_request(llm: LLM) -> None:
    request = Request(
        id="late",
        prompt_ids=(5, 6),
        params=SamplingParams(max_tokens=700, ignore_eos=True),
        deadline=time.monotonic() - 1,
    )
    last = list(llm.engine.submit(request))[-1]
    assert last.finish_reason is FinishReason.ABORT
    assert "deadline" in last.error


def test_a_slot_reused_many_times_answers_like_a_fresh_engine(engines: Engines) -> None:
    llm = engines()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first = llm.generate([[7, 8, 9]], params)[0].token_ids
    noisy = SamplingParams(max_tokens=2, presence_penalty=2.0, logit_bias={4: 50.0}, stop_token_ids=[9], min_tokens=2)
    llm.generate([[10 + i % 300, 4] for i in range(400)], noisy)
    assert llm.generate([[7, 8, 9]], params)[0].token_ids == first


def test_stop_and_start_again_in_one_process(tiny_folder) -> None:
    from tests.engine.conftest import SMALL

    llm = LLM(model=str(tiny_folder), **SMALL)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first = llm.generate([[7, 8, 9]], params)[0].token_ids
    llm.engine.stop()
    with pytest.raises(RequestError, match="shutting down"):
        llm.generate([[7, 8, 9]], params)
    llm.engine.start()
    assert llm.generate([[7, 8, 9]], params)[0].token_ids == first
    llm.close()


def test_a_dead_loop_ends_every_stream_with_an_error(tiny_folder, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    from tests.engine.conftest import SMALL

    llm = LLM(model=str(tiny_folder), **SMALL)
    handles = [
        llm.engine.submit(
            Request(id=str(i), prompt_ids=(5, 6), params=SamplingParams(max_tokens=500, ignore_eos=True, n=2))
        )
        for i in range(5)
    ]

    def broken(_plan):
        raise RuntimeError("the device fell off")

    monkeypatch.setattr(llm.engine._runner, "dispatch", broken)
    for handle in handles:
        ends = [chunk for chunk in handle if chunk.finish_reason is not None]
        assert len(ends) == 2
        assert all(chunk.finish_reason is FinishReason.ERROR and "fell off" in chunk.error for chunk in ends)
    assert not llm.engine.is_healthy
    with pytest.raises(RequestError, match="fell off"):
        llm.engine.submit(Request(id="after", prompt_ids=(5, 6)))
    llm.close()
