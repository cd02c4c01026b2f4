"""How prompts are computed: in chunks, in rows, once for everybody, and never at the cost of who is streaming."""

from __future__ import annotations

import pytest

from jaxserve.request import FinishReason
from jaxserve.sched.plan import Plan
from tests.sched.harness import Loop, make_config, some_prompt


def buckets(plans: list[Plan]) -> list[tuple[int, int]]:
    return [(plan.prefill.rows_bucket, plan.prefill.queries) for plan in plans if plan.prefill]


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("bucket", [(1, 3), (1, 4), (2, 7), (4, 16), (1, 48)])
def test_chunked_prefill_equals_whole_over_every_page_border(length, bucket):
    """And decode over the next border (fault 16)."""
    loop = Loop(make_config(prefill_buckets=(bucket,)))
    loop.ask("r", some_prompt(length), max_tokens=12, ignore_eos=True)
    loop.run()
    loop.verify()
    starts = [row.start for plan in loop.plans if plan.prefill for row in plan.prefill.rows]
    assert starts == list(range(0, length, bucket[1]))


@pytest.mark.parametrize("lengths", [(5, 7), (4, 9), (13, 2), (15, 16), (1, 1)])
def test_batch_matches_single(lengths):
    """Lengths that are no multiple of the page (fault 34); the loop compares each with a run alone."""
    loop = Loop()
    for i, length in enumerate(lengths):
        loop.ask(f"r{i}", some_prompt(length, i), max_tokens=11, ignore_eos=True)
    loop.run()
    loop.verify()
    assert loop.scheduler.load().totals.steps < 2 + 11 + 2


def test_many_short_prompts_share_a_call():
    loop = Loop()
    for i in range(4):
        loop.ask(f"r{i}", some_prompt(4, i), max_tokens=1)
    loop.run()
    assert buckets(loop.plans) == [(4, 4)]
    assert loop.scheduler.load().totals.prefill_padding == 0


def test_a_prompt_alone_takes_the_bucket_that_wastes_least():
    for length, bucket in ((16, (1, 16)), (6, (1, 8)), (2, (1, 2))):
        loop = Loop(make_config(prefill_buckets=((1, 16), (1, 8), (1, 2)), prefill_seconds=(2.6, 1.8, 1.2)))
        loop.ask("r", some_prompt(length), max_tokens=1)
        loop.run()
        assert buckets(loop.plans) == [bucket]


def test_one_row_belongs_to_a_very_long_prompt_while_others_wait():
    loop = Loop(make_config(slots=8, decode_buckets=(8,), num_pages=97, prefix_reuse=False))
    for i in range(3):
        loop.ask(f"long{i}", some_prompt(40, i), max_tokens=1)
    for i in range(3, 8):
        loop.ask(f"short{i}", some_prompt(4, i), max_tokens=1)
    long_numbers = {0, 1, 2}
    while loop.scheduler.load().waiting or loop.unread:
        plan = loop.step()
        if plan is None or plan.prefill is None:
            break
        shorts_wait = any(not s.is_ended for (name, _), s in loop.streams.items() if name.startswith("short"))
        if shorts_wait and loop.scheduler.load().waiting > 2:
            assert len(long_numbers & {row.sequence for row in plan.prefill.rows}) == 1
            assert len(plan.prefill.rows) > 1, "nor has it a call to itself"
    loop.run()
    loop.verify()
    ends = [plan.step for name in ("short3", "long2") for plan in loop.plans if row_of(loop, name, plan)]
    assert ends == sorted(ends), "the short ones do not wait for the last long one"


def row_of(loop: Loop, name: str, plan: Plan) -> bool:
    number = list(loop.streams).index((name, 0))
    return any(row.sequence == number and row.takes_token for row in plan.rows)


def test_a_streaming_row_waits_for_one_bounded_call_at_most():
    """Twenty long prompts arrive beside one chat (fault 45): every step holds its row, and no slow bucket."""
    config = make_config(
        slots=8, decode_buckets=(8,), num_pages=300, queue_limit=99,
        prefill_buckets=((1, 16), (4, 4), (1, 4)), prefill_seconds=(0.3, 0.35, 0.1), max_decode_wait=0.25,
    )  # fmt: skip
    loop = Loop(config)
    loop.ask("chat", some_prompt(3), max_tokens=40, ignore_eos=True)
    loop.step()
    loop.step()
    for i in range(20):
        loop.ask(f"r{i}", some_prompt(44, i), max_tokens=1)
    begun = len(loop.plans)
    while not loop.streams["chat", 0].is_ended:
        loop.step()
    crowded = [plan for plan in loop.plans[begun:] if plan.decode and 0 in {row.sequence for row in plan.decode.rows}]
    assert len(crowded) == 40 - 1 - begun + 1
    assert crowded == loop.plans[begun : begun + len(crowded)], "a token every step"
    assert set(buckets(crowded)) == {(1, 4)}
    loop.run()
    loop.verify()
    assert (1, 16) in buckets(loop.plans), "with nobody streaming the larger bucket is better"


def test_a_burst_with_one_prefix_computes_it_once():
    """Thirty-two prompts of 40 tokens that share 36: the first computes them, the others wait and compute their own."""
    loop = Loop(make_config(slots=8, decode_buckets=(8,), num_pages=200))
    for i in range(32):
        loop.ask(f"r{i}", (*some_prompt(36), i, i + 1, 2, 3), max_tokens=3, ignore_eos=True)
    loop.run()
    loop.verify()
    totals = loop.scheduler.load().totals
    assert totals.prefill_tokens == 36 + 32 * 4
    assert totals.prefix_hit_tokens == 31 * 36


def test_samples_prefill_their_prompt_once():
    loop = Loop()
    loop.ask("r", some_prompt(33), n=4, max_tokens=4, ignore_eos=True)
    loop.run()
    loop.verify()
    assert loop.scheduler.load().totals.prefill_tokens == 33 + 3 * 1
    assert [loop.streams["r", i].last.usage.cached_tokens for i in range(4)] == [0, 32, 32, 32]


def test_when_the_owner_of_a_prefix_ends_the_next_waiter_computes_it():
    loop = Loop(make_config(prefill_buckets=((2, 8),)))
    for i in range(3):
        loop.ask(f"r{i}", (*some_prompt(36), i, i), max_tokens=2)
    loop.step()
    loop.scheduler.abort("r0")
    loop.run()
    loop.verify()
    totals = loop.scheduler.load().totals
    assert totals.prefill_tokens == 8 + (38 - 8) + (38 - 36), "what the owner computed is kept, the rest is done once"


def test_a_full_prompt_hit_computes_its_last_page_privately():
    """Fault 40: at least one token is computed, and a shared page is never written (the loop checks that)."""
    loop = Loop()
    for i in range(3):
        loop.ask(f"r{i}", some_prompt(16), max_tokens=6, seed=i, ignore_eos=True)
        loop.run()
    loop.verify()
    assert [stream.last.usage.cached_tokens for stream in loop.streams.values()] == [0, 12, 12]
    assert loop.scheduler.load().totals.prefill_tokens == 16 + 4 + 4


def test_prefix_hit_changes_no_token():
    for reuse in (False, True):
        loop = Loop(make_config(prefix_reuse=reuse))
        for i in range(6):
            loop.ask(f"r{i}", (*some_prompt(6 + 5 * i), i), max_tokens=9)
            loop.run()
        loop.verify()
        assert (loop.scheduler.load().totals.prefix_hit_tokens > 0) is reuse
        assert (loop.scheduler.load().pages_cached > 0) is reuse


def test_batch_invariant_keys_no_generated_page():
    loop = Loop(make_config(batch_invariant=True, decode_buckets=(4,), prefill_buckets=((2, 8),)))
    loop.ask("turn1", some_prompt(10), max_tokens=20, ignore_eos=True)
    loop.run()
    assert loop.scheduler.load().pages_cached == 2
    loop.ask("turn2", (*some_prompt(10), *loop.streams["turn1", 0].token_ids), max_tokens=3)
    loop.run()
    loop.verify()
    assert loop.streams["turn2", 0].last.usage.cached_tokens == 8


def test_priority_orders_the_queue_and_age_keeps_it_from_starving():
    """One slot; a low request among a stream of high ones (fault 46)."""
    loop = Loop(make_config(slots=1, decode_buckets=(1,), age_seconds=0.2))
    loop.ask("low", some_prompt(4), priority=0, max_tokens=2)
    ended = []
    for i in range(60):
        loop.ask(f"high{i}", some_prompt(4, i), priority=1, max_tokens=2)
        for _ in range(3):
            loop.step()
        if loop.streams["low", 0].is_ended:
            break
        ended = [name for (name, _), stream in loop.streams.items() if stream.is_ended]
    assert len(ended) > 3, "the high ones went first"
    assert loop.streams["low", 0].last.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    loop.run()
    loop.verify()


def test_equal_priorities_are_served_in_order_of_arrival():
    loop = Loop(make_config(slots=1, decode_buckets=(1,)))
    for i in range(6):
        loop.ask(f"r{i}", some_prompt(5, i), max_tokens=3)
    loop.run()
    loads = [row.sequence for plan in loop.plans if plan.prefill for row in plan.prefill.rows]
    assert loads == sorted(loads)
