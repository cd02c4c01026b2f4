"""The engine's measurements: of real requests, against clocks and counts of the caller; they outlive a restart."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.metrics import Distributions, Snapshot
from jaxserve.request import Request
from tests.engine.conftest import Engines

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def counters(snapshot: Snapshot) -> dict[str, float]:
    totals = snapshot.load.totals
    numbers: dict[str, float] = {f"accepted {i}": count for i, count in enumerate(totals.accepted_runs)}
    numbers |= {name: getattr(totals, name) for name in totals.__dataclass_fields__ if name != "accepted_runs"}
    for name in Distributions.__dataclass_fields__:
        reading = getattr(snapshot.distributions, name)
        numbers |= {f"{name} {i}": count for i, count in enumerate(reading.counts)} | {f"{name} sum": reading.sum}
    return numbers | {
        "requests": snapshot.requests, "compiles": snapshot.compiles, "cpu": snapshot.loop_cpu_seconds,
    }  # fmt: skip


def grown(before: Snapshot, after: Snapshot, name: str) -> float:
    return counters(after)[name] - counters(before)[name]


def test_a_sequence_s_times_lie_in_order_and_within_the_caller_s(llm: LLM) -> None:
    began = time.monotonic()
    last = list(llm.engine.submit(Request(id="times", prompt_ids=(5, 6, 7), params=GREEDY)))[-1]
    times = last.times
    assert began <= times.arrived <= times.admitted <= times.first_token <= times.ended <= time.monotonic()


def test_every_token_and_ending_is_observed_once(llm: LLM) -> None:
    before = llm.engine.metrics()
    began = time.monotonic()
    llm.generate([[9, 8, 7 + i] for i in range(6)], GREEDY)  # more than there are slots
    seconds = time.monotonic() - began
    after = llm.engine.metrics()
    old, new = before.distributions, after.distributions
    assert new.queue.count - old.queue.count == new.end_to_end.count - old.end_to_end.count == 6
    assert new.time_to_first_token.count - old.time_to_first_token.count == 6
    assert new.inter_token_latency.count - old.inter_token_latency.count == 6 * 11
    assert new.output_tokens.sum - old.output_tokens.sum == 6 * 12
    assert new.prompt_tokens.sum - old.prompt_tokens.sum == 6 * 3
    assert new.end_to_end.sum - old.end_to_end.sum <= 6 * seconds
    # first token + gaps = the whole, for each and so for the sum
    parts = (new.time_to_first_token.sum - old.time_to_first_token.sum) + (
        new.inter_token_latency.sum - old.inter_token_latency.sum
    )
    assert parts == pytest.approx(new.end_to_end.sum - old.end_to_end.sum, rel=1e-6)
    in_steps = (new.step_host.sum - old.step_host.sum) + (new.step_wait.sum - old.step_wait.sum)
    assert 0 < in_steps <= seconds
    assert after.load.totals.steps > before.load.totals.steps
    assert grown(before, after, "requests") == 6 and after.compiles == 0


def test_prefix_hits_are_a_share_of_the_tokens_looked_up(llm: LLM) -> None:
    prompt = tuple(range(100, 164))
    llm.generate([prompt], GREEDY)
    before = llm.engine.metrics().load.totals
    output = llm.generate([prompt], GREEDY)[0]
    after = llm.engine.metrics().load.totals
    assert after.prefix_query_tokens - before.prefix_query_tokens == 64
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == output.usage.cached_tokens == 48


def test_no_counter_falls_over_a_restart_and_nothing_is_left_behind(engines: Engines) -> None:
    llm = engines()
    llm.generate([[3, 4, 5]], GREEDY)
    readings = [llm.engine.metrics()]
    for step in (llm.engine.stop, llm.engine.start, lambda: llm.generate([[3, 4, 5]], GREEDY)):
        step()
        readings.append(llm.engine.metrics())
    for before, after in pairwise(readings):
        fallen = {name for name, value in counters(after).items() if value < counters(before)[name]}
        assert not fallen
    assert grown(readings[0], readings[-1], "requests") == 1
    assert not llm.engine._meter._lives and not llm.engine._meter._open
