"""Random traces through the loop of DESIGN section 6, one step ahead: no token depends on scheduling; everything comes
back; and each rule that keeps it so is broken on purpose, to see that this harness would notice."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.decode import DecodePlanner
from jaxserve.sched.prefill import PrefillPlanner
from jaxserve.sched.roster import Roster
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.sequence import SequenceState
from tests.fakes import FakeDevice
from tests.sched.harness import VOCAB, Loop, WrongAnswer, make_config, make_request, some_prompt
from tests.sched.traces import Trace

DRAFTS = pytest.mark.parametrize("num_drafts", [0, 3])


@DRAFTS
@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_pages_are_conserved_every_request_ends_once_and_no_token_depends_on_scheduling(num_drafts, seed):
    """All three are checked by the loop: pages and slots after every step, ends and tokens for every sequence."""
    Trace(seed, num_drafts).play()


def test_the_traces_meet_what_they_are_for():
    """A trace that never preempts, hits, trims, stops or fails would prove nothing."""
    loops = [Trace(seed, num_drafts).play().scheduler.load().totals for seed in range(12) for num_drafts in (0, 3)]
    for name in (field.name for field in dataclasses.fields(loops[0])):
        counts = [getattr(totals, name) for totals in loops]
        assert any(map(any, counts)) if name == "accepted_runs" else any(counts), f"no trace had any {name}"


@DRAFTS
def test_overlap_changes_no_token(num_drafts):
    """The same requests, read at once: `verify` holds both to the same answers, so this is about the loop alone."""

    class Lockstep(Loop):
        def step(self):
            plan = super().step()
            if plan is not None:
                super().step()
            return plan

    for kind in (Loop, Lockstep):
        loop = kind(make_config(num_drafts=num_drafts))
        for i in range(6):
            loop.ask(f"r{i}", some_prompt(5 + 3 * i, i // 2), max_tokens=14, n=1 + i % 2)
        loop.run()
        loop.verify()


def play(traces: int, num_drafts: int, make_device=None, **config) -> Counter[str]:
    """How traces ended: "right", or the name of the error.  `WrongAnswer` is the one that only this device can see."""
    ends = Counter()
    for seed in range(traces):
        try:
            Trace(seed, num_drafts, make_config(num_drafts=num_drafts, **config), make_device).play()
            ends["right"] += 1
        except (AssertionError, LookupError) as error:
            ends[type(error).__name__] += 1
    return ends


@DRAFTS
def test_the_whole_rules_give_right_answers(num_drafts):
    assert play(15, num_drafts, num_pages=16) == {"right": 15}


def test_breaking_rule_3_no_clamp_on_the_device_is_noticed():
    """A row near the context runs past its limit: its positions wrap into its own last page."""
    assert play(10, 3, lambda config, seed: FakeDevice(config, vocab=VOCAB, seed=seed, clamps=False))["WrongAnswer"]


def test_breaking_rule_3_a_position_guessed_by_the_host_is_noticed(monkeypatch):
    plan_row = DecodePlanner._row

    def guess(planner, sequence, q_len, **how):
        start = sequence.shortest - 1
        return dataclasses.replace(plan_row(planner, sequence, q_len, **how), start=start)

    monkeypatch.setattr(DecodePlanner, "_row", guess)
    monkeypatch.setattr(DecodePlanner, "_again", lambda planner: None)  # every row anew, with its own guess
    monkeypatch.setattr(FakeDevice, "_start", lambda device, row: row.start)
    assert play(4, 0) == {"right": 4}, "without drafts the host's bounds are exact"
    assert play(4, 3)["WrongAnswer"]


def test_breaking_rule_4_trimming_what_an_unread_step_may_write_is_noticed(monkeypatch):
    def trim(roster, sequence):
        needed = -(-(sequence.length - 1 + sequence.unread) // roster.config.page_size)
        roster.pool.release(sequence.pages[needed:])
        del sequence.pages[needed:]
        sequence.row = None

    monkeypatch.setattr(Roster, "trim", trim)
    assert play(10, 3, num_pages=16)["WrongAnswer"]


@DRAFTS
def test_breaking_rule_6_reading_rows_of_an_old_epoch_is_noticed(monkeypatch, num_drafts):
    """Rows are taken for whoever has their slot now."""

    def current(scheduler, row):
        found = [sequence for sequence in scheduler.roster.running.values() if sequence.slot == row.slot]
        if found and found[0].number != row.sequence:
            found[0].plan_tokens(row.q_len if row.start < 0 else 1)
        return found[0] if found else None

    monkeypatch.setattr(Scheduler, "current", current)
    assert play(10, num_drafts, num_pages=16)["WrongAnswer"]


def test_a_call_made_again_after_a_sequence_has_left_is_noticed(monkeypatch):
    monkeypatch.setattr(Roster, "moves", property(lambda roster: 0, lambda roster, value: None), raising=False)
    assert not play(10, 0, num_pages=16)["right"]


def test_a_call_made_again_without_the_pages_it_needs_is_noticed(monkeypatch):
    monkeypatch.setattr(SequenceState, "steps_left", lambda sequence, page_size: sequence.limit - sequence.shortest)
    assert play(10, 0)["right"] < 10


def test_a_call_made_again_past_a_limit_is_noticed(monkeypatch):
    monkeypatch.setattr(SequenceState, "steps_left", lambda sequence, page_size: 1)
    assert play(10, 0)["right"] < 10


def two_turns() -> int:
    """Talks of every length, each with a second turn that repeats the first.  -> prompt tokens taken from the table."""
    loop = Loop()
    for length in range(1, 13):
        first = loop.ask(f"{length}/1", some_prompt(4, length), max_tokens=length, ignore_eos=True)
        loop.run()
        spoken = loop.streams[first.id, 0].token_ids
        loop.ask(f"{length}/2", (*first.prompt_ids, *spoken, 1), max_tokens=5)
        loop.run()
    loop.verify()
    return loop.scheduler.load().totals.prefix_hit_tokens


def test_the_next_turn_hits_the_generated_pages_that_are_written():
    """Of 4 + n tokens the last has no K/V: (4 + n - 1) // 4 pages are keyed."""
    assert two_turns() == sum((4 + n - 1) // 4 * 4 for n in range(1, 13))


def test_breaking_rule_7_a_key_for_a_page_that_is_not_written_is_noticed(monkeypatch):
    def publish_output(roster, sequence):
        roster._name_output(sequence)
        roster.publish(sequence, sequence.length)

    monkeypatch.setattr(Roster, "publish_output", publish_output)
    with pytest.raises(WrongAnswer):
        two_turns()
    assert play(30, 0)["WrongAnswer"]


def test_breaking_rule_7_a_key_before_the_chunk_is_dispatched_is_noticed(monkeypatch):
    admit = Roster.admit

    def eager(roster, sequence):
        load = admit(roster, sequence)
        published = sequence.published
        roster.publish(sequence, sequence.target)
        sequence.published = published
        return load

    monkeypatch.setattr(Roster, "admit", eager)
    assert play(10, 0)["WrongAnswer"]


def recomputed_when_two_need_what_the_other_holds() -> int:
    """Nine pages of 16 tokens for two sequences that come to need five each: one page short (fault 44)."""
    loop = Loop(make_config(page_size=16, num_pages=10, max_len=80, slots=2, decode_buckets=(2,)))
    for i in range(2):
        loop.ask(f"r{i}", some_prompt(20, i), max_tokens=60, ignore_eos=True)
    loop.run()
    loop.verify()
    return loop.scheduler.load().totals.recomputed_tokens


def test_two_that_need_what_the_other_holds_both_finish_without_thrashing(monkeypatch):
    """Rule 8, by a count: one preemption, at most one recompute of the victim; broken, it starts again and again."""
    assert 0 < recomputed_when_two_need_what_the_other_holds() < 80
    monkeypatch.setattr(PrefillPlanner, "_room", lambda planner: planner.roster.pool.available)
    assert recomputed_when_two_need_what_the_other_holds() > 80


def test_plans_are_never_changed_after_dispatch():
    """What a dispatched step holds is read late (fault 38)."""
    loop = Loop(make_config(num_pages=16, num_drafts=3))
    copies = []
    for i in range(8):
        loop.add(make_request(f"r{i}", some_prompt(9, i), max_tokens=20))
    while loop.scheduler.has_unfinished:
        plan = loop.step()
        copies.append(repr(plan))
    loop.run()
    assert [repr(plan) for plan in loop.plans] == [text for text in copies if text != "None"]
