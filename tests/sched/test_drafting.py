"""A draft with K/V of its own: it never reads what it has not computed, and is as good as ever wherever it runs.

The fake device asserts the first at every position a draft reads; with `accept=1.0` a draft that is asked is right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.pages import PagePool
from jaxserve.sched.sequence import SequenceState
from jaxserve.sched.speculation import Speculation, Wish
from tests.fakes import FakeDevice
from tests.sched.harness import VOCAB, Loop, make_config, some_prompt
from tests.sched.test_adaptive import adaptive, run
from tests.sched.traces import Trace

K = 3


def drafting(accept: float = 1.0, device=None, **config) -> Loop:
    config = make_config(**{"num_drafts": K, "has_draft_pool": True, **config})
    return Loop(config, device=device or FakeDevice(config, vocab=VOCAB, accept=accept))


def tracked(seed: int, **config) -> Loop:
    return Trace(seed, K, make_config(num_drafts=K, has_draft_pool=True, **config)).play()


def usage(loop: Loop, name: str):
    return loop.streams[name, 0].last.usage


def serve(loop: Loop, name: str, prompt, **options):
    """Alone, to its end.  -> usage, and the positions that the draft's own prefill computed for it."""
    before = loop.scheduler.load().totals.draft_prefill_tokens
    loop.ask(name, prompt, **{"max_tokens": 24, "ignore_eos": True, **options})
    loop.run()
    return usage(loop, name), loop.scheduler.load().totals.draft_prefill_tokens - before


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), pages=st.sampled_from((14, 18, 25, 40)))
def test_a_draft_reads_only_what_it_has_computed(seed, pages):
    """Hits, opt-outs, masks, preemptions, aborts and stops at random, one step ahead."""
    tracked(seed, num_pages=pages)


@pytest.mark.parametrize("prompt_len", [1, 5, 16, 23])
def test_the_draft_computes_every_chunk_that_the_target_computes(prompt_len):
    loop = drafting()
    used, computed = serve(loop, "r", some_prompt(prompt_len))
    loop.verify()
    assert computed == prompt_len, "in step from the first token on: nothing is computed later"
    assert used.drafted_tokens == used.accepted_tokens > 0
    for plan in loop.plans:
        if plan.prefill:
            assert [(row.start, row.q_len) for row in plan.draft_prefill.rows] == [
                (row.start, row.q_len) for row in plan.prefill.rows
            ]


@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0])
def test_rejected_drafts_leave_the_draft_level(accept):
    """What a rejected run wrote is written over: no call of the draft beyond the prompt's."""
    loop = drafting(accept)
    _, computed = serve(loop, "r", some_prompt(9))
    loop.verify()
    assert computed == 9


def test_a_request_that_opts_out_costs_the_draft_nothing():
    loop = drafting()
    used, computed = serve(loop, "r", some_prompt(9), speculate=False)
    loop.verify()
    assert used.drafted_tokens == computed == 0
    assert not any(row.is_drafted for plan in loop.plans for row in plan.rows)


def test_a_hit_on_pages_without_the_drafts_part_is_caught_up_and_then_drafted():
    """The pages of a request that opted out, twice: who comes first computes the draft's part, for everybody."""
    loop, prompt = drafting(), some_prompt(17)
    serve(loop, "plain", prompt, speculate=False, max_tokens=2)
    first, caught_up = serve(loop, "first", prompt, seed=1)
    again, rest = serve(loop, "again", prompt, seed=2)
    loop.verify()
    assert first.cached_tokens == again.cached_tokens == 16
    assert caught_up >= 17 and rest == 1, "the second finds the draft's part of all four pages"
    for used in (first, again):
        assert used.drafted_tokens == used.accepted_tokens > 0


def test_alternating_plain_and_speculated_turns_of_one_talk_stay_exact():
    """Acceptance is 100% and stays so, whoever computed the pages; a plain turn's part is all there is to catch up on."""
    loop, prompt = drafting(max_len=400, num_pages=200), some_prompt(6)
    for turn in range(12):
        is_plain = turn % 2 == 1
        used, computed = serve(loop, f"{turn}", prompt, max_tokens=20, speculate=not is_plain)
        assert used.accepted_tokens == used.drafted_tokens and (used.drafted_tokens == 0) == is_plain
        assert computed <= 6 + 2 * 23, "more than the last two turns"
        prompt = (*prompt, *loop.streams[f"{turn}", 0].token_ids, 1, 2, 3)
    loop.verify()


def test_generated_pages_carry_the_drafts_part():
    """The next turn of a talk: both find the pages that the first turn filled."""
    loop, prompt = drafting(), some_prompt(5)
    serve(loop, "1", prompt, max_tokens=16)
    used, computed = serve(loop, "2", (*prompt, *loop.streams["1", 0].token_ids, 1), max_tokens=12)
    loop.verify()
    assert used.cached_tokens == 20
    assert computed == 2


def test_a_preempted_request_resumes_with_its_draft():
    loop = drafting(num_pages=16)
    for i in range(5):
        loop.ask(f"r{i}", some_prompt(9, i), max_tokens=30, ignore_eos=True)
    loop.run()
    loop.verify()
    totals = loop.scheduler.load().totals
    assert totals.preemptions > 0
    assert totals.drafted_tokens == totals.accepted_tokens > 0


def test_a_row_that_catches_up_goes_on_without_drafts_meanwhile():
    """A long catch-up beside streaming rows: a chunk a step, and a token a step."""
    loop, prompt = drafting(max_len=200, num_pages=120), some_prompt(101)
    serve(loop, "plain", prompt, speculate=False, max_tokens=1)
    used, _ = serve(loop, "r", prompt, max_tokens=60)
    loop.verify()
    assert used.cached_tokens == 100
    decode = [plan.decode.rows[0] for plan in loop.plans if plan.decode and plan.decode.rows[0].sequence == 1]
    first = next(i for i, row in enumerate(decode) if row.is_drafted)
    assert 101 // 16 <= first <= 10, "the draft was level too early, or much too late"
    assert all(row.q_len == 1 for row in decode[:first])
    assert all(row.is_drafted for row in decode[first:])
    assert used.drafted_tokens == used.accepted_tokens > 0


def test_a_row_whose_draft_was_left_out_for_a_while_catches_up(monkeypatch):
    """Speculation switched off and on again, as an engine does that finds it slower than none."""
    loop, wish = drafting(), Speculation.wish

    def fickle(speculation, rows, *, is_level):
        found = wish(speculation, rows, is_level=is_level)
        speculation.wants_drafts = len(loop.plans) % 12 < 6
        return found if speculation.wants_drafts else Wish(0)

    monkeypatch.setattr(Speculation, "wish", fickle)
    for i in range(4):
        loop.ask(f"r{i}", some_prompt(3 + i, i), max_tokens=40, ignore_eos=True)
    loop.run()
    loop.verify()
    totals = loop.scheduler.load().totals
    assert totals.drafted_tokens == totals.accepted_tokens > 0
    assert totals.draft_prefill_tokens > 3 + 4 + 5 + 6


def test_a_draft_that_gains_nothing_falls_behind_and_catches_up_for_a_probe():
    """Fault 52: switched off it costs nothing, and it comes back when its drafts are right again."""
    loop = run(adaptive(0.3, has_draft_pool=True), accept=0.05)
    bad = loop.scheduler.load().totals
    assert bad.verify_calls < bad.decode_calls / 6
    assert bad.draft_prefill_tokens < (bad.prefill_tokens + bad.output_tokens) / 3
    loop.device.accept = 1.0
    for i in range(60):
        loop.ask(f"s{i}", some_prompt(4, i), max_tokens=40, ignore_eos=True)
    loop.run()
    loop.verify()
    good = loop.scheduler.load().totals
    assert good.verify_calls > bad.verify_calls, "a probe never came to its drafts"


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), verify=st.sampled_from((0.01, 0.1, 0.4)), num_pages=st.sampled_from((14, 18, 40)))
def test_a_draft_reads_only_what_it_has_computed_when_it_comes_and_goes(seed, verify, num_pages):
    Trace(seed, 7, adaptive(verify, has_draft_pool=True, num_pages=num_pages)).play()


# Each rule broken on purpose.


def noticed(traces: int = 10, **config) -> int:
    found = 0
    for seed in range(traces):
        try:
            tracked(seed, num_pages=16, **config)
        except AssertionError as error:
            found += "K/V of the draft" in str(error)
    return found


def test_the_whole_rules_hold_in_these_traces():
    assert noticed() == 0


def test_a_last_draft_that_is_not_fed_to_the_draft_is_noticed():
    config = make_config(num_drafts=K, has_draft_pool=True)
    device = FakeDevice(config, vocab=VOCAB, accept=1.0, writes_last=False)
    with pytest.raises(AssertionError, match="K/V of the draft"):
        serve(drafting(device=device), "r", some_prompt(9))


def test_a_bit_that_outlives_its_page_is_noticed(monkeypatch):
    allocate = PagePool.allocate

    def forgetful(pool, count):
        drafted = list(pool._drafted)
        pages = allocate(pool, count)
        pool._drafted = drafted
        return pages

    monkeypatch.setattr(PagePool, "allocate", forgetful)
    assert noticed()


def test_a_hit_that_is_taken_for_drafted_is_noticed(monkeypatch):
    monkeypatch.setattr(PagePool, "is_drafted", lambda pool, page: True)
    assert noticed()


def test_guesses_taken_for_the_drafts_past_are_noticed(monkeypatch):
    """A step without the draft, after one whose drafts were rejected."""

    def plan_decode(sequence, q_len, *, is_drafted):
        sequence.plan_tokens(q_len)
        if is_drafted:
            sequence.draft_len = sequence.longest_kv(0)

    monkeypatch.setattr(SequenceState, "plan_decode", plan_decode)
    loop, wish = drafting(0.0, max_len=200, num_pages=100), Speculation.wish
    monkeypatch.setattr(
        Speculation,
        "wish",
        lambda self, rows, **is_level: wish(self, rows, **is_level) if len(loop.plans) % 5 else Wish(0),
    )
    with pytest.raises(AssertionError, match="K/V of the draft"):
        serve(loop, "r", some_prompt(9), max_tokens=150)
