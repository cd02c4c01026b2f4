"""What happens when pages run out, and that they all come back."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.request import FinishReason
from tests.fakes import FakeDevice
from tests.sched.harness import VOCAB, Loop, make_config, some_prompt

DRAFTS = pytest.mark.parametrize("num_drafts", [0, 3])


@DRAFTS
def test_preempted_request_resumes_with_same_tokens(num_drafts):
    loop = Loop(make_config(num_pages=16, num_drafts=num_drafts))
    for i in range(5):
        loop.ask(f"r{i}", some_prompt(9, i), max_tokens=30, ignore_eos=True, logprobs=0)
    loop.run()
    loop.verify()
    assert loop.scheduler.load().totals.preemptions > 0


def test_the_victim_is_of_the_lowest_priority_then_the_latest_admitted():
    loop = Loop(make_config(num_pages=13, max_len=40))
    for start, (name, priority) in enumerate((("low", 0), ("old", 1), ("new", 1))):
        loop.ask(name, some_prompt(10, start), priority=priority, max_tokens=26, ignore_eos=True)
    order = []
    waited = set()
    while loop.scheduler.has_unfinished:
        loop.step()
        waiting = {s.request.id for s in loop.scheduler.roster.waiting if s.is_resumed}
        order += sorted(waiting - waited)
        waited = waiting
    loop.run()
    loop.verify()
    assert order[:2] == ["low", "new"]
    assert "old" not in order


def test_recompute_after_preemption_is_not_a_cache_hit():
    loop = Loop(make_config(num_pages=13))
    for i in range(3):
        loop.ask(f"r{i}", some_prompt(9, i), max_tokens=30, ignore_eos=True)
    loop.run()
    loop.verify()
    totals = loop.scheduler.load().totals
    assert totals.preemptions > 0
    assert totals.recomputed_tokens > 0
    assert totals.prefix_hit_tokens == 0
    assert all(stream.last.usage.cached_tokens == 0 for stream in loop.streams.values())


def too_small(loop_pages: int) -> Loop:
    """A loop whose pool is smaller than one sequence, which SchedulerConfig refuses to make."""
    config = make_config()
    object.__setattr__(config, "num_pages", loop_pages)
    return Loop(config)


@pytest.mark.parametrize("prompt_len", [6, 30])
def test_a_pool_too_small_for_one_request_ends_it_with_an_error_and_nothing_spins(prompt_len):
    """It runs out in decode, or cannot even hold the prompt (fault 43); a smaller one behind it is served."""
    loop = too_small(5)
    loop.ask("big", some_prompt(prompt_len), ignore_eos=True)
    loop.ask("small", some_prompt(5, 1), max_tokens=4, ignore_eos=True)
    loop.streams["big", 0].may_fail = True
    loop.run(most=200)
    loop.verify()
    last = loop.streams["big", 0].last
    assert last.finish_reason is FinishReason.ERROR
    assert "4 pages of 4 tokens" in last.error
    assert loop.streams["small", 0].last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_pages", [12, 16, 20])
def test_a_hit_behind_a_page_that_may_be_evicted_is_not_counted_on(num_pages):
    """`b` computes its first page once more, for its logprobs, and the table keeps that of `a`, which has ended.  `c`
    evicts it, and for `d`, admitted in the same step, the pages behind it are no hits any more."""
    loop, shared = Loop(make_config(num_pages=num_pages, max_len=44)), some_prompt(17)
    loop.ask("a", shared[:5], max_tokens=1)
    loop.run()
    loop.ask("z", some_prompt(16, 5), max_tokens=1)
    loop.run()
    loop.ask("b", shared, max_tokens=27, ignore_eos=True, prompt_logprobs=0)
    for _ in range(6):
        loop.step()
    loop.ask("c", some_prompt(4 + 4 * (num_pages - 12), 9), max_tokens=1, priority=1)
    loop.ask("d", shared, max_tokens=1)
    loop.run()
    loop.verify()


def pages_held(loop: Loop) -> int:
    return loop.scheduler.load().pages_held


@DRAFTS
@pytest.mark.parametrize("when", ["before scheduling", "between chunks", "while preempted", "in the last step"])
def test_an_abort_gives_its_pages_back_within_a_step(when, num_drafts):
    """Fault 42."""
    loop = Loop(make_config(num_pages=14, num_drafts=num_drafts, prefill_buckets=((1, 8),)))
    other = when == "while preempted"
    if other:
        loop.ask("other", some_prompt(9, 3), max_tokens=38, ignore_eos=True)
        loop.step()
        loop.step()
    loop.ask("r", some_prompt(20), max_tokens=9 if not other else 28, ignore_eos=True)
    if when == "between chunks":
        loop.step()
        assert loop.scheduler.roster.alive[0].computed == 8
    elif when == "while preempted":
        while not loop.scheduler.load().totals.preemptions:
            loop.step()
    elif when == "in the last step":
        while loop.scheduler.roster.alive[0].longest_kv(0) < 28:
            loop.step()
    assert loop.scheduler.abort("r")
    loop.scheduler.check()
    assert other or pages_held(loop) == 0
    loop.run()
    loop.verify()
    assert loop.streams["r", 0].last.finish_reason is FinishReason.ABORT


@DRAFTS
def test_pages_freed_while_a_step_in_flight_writes_them_may_be_reused(num_drafts):
    """Fault 39: every request is aborted with a step unread, and the next one takes its pages and its slot at once."""
    loop = Loop(make_config(num_pages=13, slots=1, decode_buckets=(1,), num_drafts=num_drafts))
    for i in range(12):
        loop.ask(f"r{i}", some_prompt(30, i), max_tokens=17, ignore_eos=True)
        loop.ask(f"s{i}", some_prompt(30, i + 1), max_tokens=9, ignore_eos=True)
        for _ in range(3 + i % 3):
            loop.step()
        assert loop.unread is not None
        loop.scheduler.abort(f"r{i}")
        while not loop.streams[f"s{i}", 0].is_ended:
            loop.step()
    loop.run()
    loop.verify()


@DRAFTS
def test_slots_reused_a_thousand_times_answer_as_fresh_ones(num_drafts):
    loop = Loop(make_config(slots=2, decode_buckets=(2,), num_drafts=num_drafts))
    for i in range(1000):
        loop.ask(f"r{i}", some_prompt(1 + i % 13, i % 29), max_tokens=1 + i % 3, seed=i % 5)
        loop.step()
        if loop.scheduler.load().waiting > 8:
            loop.run()
    loop.run()
    loop.verify()


def test_ten_thousand_short_requests_leave_nothing_behind():
    """Fault 41: the scheduler's memory is flat and all pages come back."""
    config = SchedulerConfig(
        slots=32, page_size=4, num_pages=257, max_len=48, queue_limit=64,
        decode_buckets=(32,), prefill_buckets=((32, 4), (8, 16)),
    )  # fmt: skip
    loop = Loop(config)
    loop.scheduler.check = lambda: None  # walks the whole pool: too slow for this many steps

    def serve(first: int, stop: int) -> int:
        for i in range(first, stop):
            loop.ask(f"r{i}", some_prompt(2 + i % 7, i), max_tokens=2, deadline=1e9)
            if i % 32 == 31:
                loop.run()
                loop.streams.clear()
                loop.plans.clear()
        gc.collect()
        return sys.getallocatedblocks()

    early, late = serve(0, 3200), serve(3200, 10016)
    assert late - early < 1000, f"{late - early} more objects after 6816 more requests"
    load = loop.scheduler.load()
    assert load.totals.stopped + load.totals.length_limited == 10016
    assert load.pages_free + load.pages_cached == 256


def test_a_row_that_reads_an_unwritten_page_would_be_seen():
    """The harness itself: NaN in every page that must not be read (fault 36 is the device's to survive)."""
    loop = Loop()
    loop.ask("r", some_prompt(9), max_tokens=5, ignore_eos=True)
    loop.step()
    loop.unread.result()
    loop.device.pages[loop.plans[0].rows[0].pages[1]][2] = None
    loop.run()
    assert loop.streams["r", 0].last.finish_reason is FinishReason.ERROR


def test_padded_columns_write_to_scrap_only():
    """Fault 35, as the fake lays pages out: a position behind the row's pages lands in page 0."""
    device = FakeDevice(make_config(), vocab=VOCAB)
    page, _ = device._place(SimpleNamespace(pages=(5, 9)), 8)
    assert page == 0
