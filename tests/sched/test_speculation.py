"""Verify rows: the text is the target's whatever the drafts, and pages for drafts come back."""

from __future__ import annotations

import pytest

from tests.fakes import FakeDevice
from tests.sched.harness import VOCAB, Loop, make_config, some_prompt


def speculate(accept: float, num_drafts: int = 3, **config) -> Loop:
    config = make_config(num_drafts=num_drafts, **config)
    return Loop(config, device=FakeDevice(config, vocab=VOCAB, accept=accept))


@pytest.mark.parametrize("num_drafts", [1, 3, 4, 7])
@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0])
def test_speculation_changes_no_token(accept, num_drafts):
    loop = speculate(accept, num_drafts, num_pages=19)
    for i in range(7):
        loop.ask(f"r{i}", some_prompt(4 + i, i), max_tokens=25, n=1 + i % 2)
    loop.run()
    loop.verify()
    totals = loop.scheduler.load().totals
    usages = [stream.last.usage for stream in loop.streams.values()]
    assert totals.drafted_tokens >= sum(usage.drafted_tokens for usage in usages) > 0
    assert totals.accepted_tokens == sum(usage.accepted_tokens for usage in usages)
    assert accept > 0 or totals.accepted_tokens < totals.drafted_tokens / 4, "a random draft is seldom right"


def test_right_drafts_are_all_accepted():
    """Fault 49: acceptance is 100% and stays so."""
    loop = speculate(1.0)
    loop.ask("r", some_prompt(5), max_tokens=40, ignore_eos=True)
    loop.run()
    loop.verify()
    usage = loop.streams["r", 0].last.usage
    assert usage.drafted_tokens == usage.accepted_tokens
    assert loop.scheduler.load().totals.decode_rows <= 2 + 40 / 4 + 1


@pytest.mark.parametrize("accept", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("prompt_len", [40, 44, 45, 46, 47])
def test_rows_at_the_end_of_the_context_stay_inside_it(prompt_len, accept):
    """Fault 50: a row at context - 1 with K = 4."""
    loop = speculate(accept, 4)
    for i in range(4):
        loop.ask(f"r{i}", some_prompt(prompt_len, i), ignore_eos=True)
    loop.run()
    loop.verify()
    assert all(len(stream.token_ids) == 48 - prompt_len for stream in loop.streams.values())


def test_every_row_reserves_pages_for_its_longest_case():
    """With one verify step unread the next may write up to 2 (K + 1) positions more than the host knows."""
    loop = speculate(1.0)
    loop.ask("r", some_prompt(8), max_tokens=40, ignore_eos=True)
    for _ in range(3):
        loop.step()
    known, (row,) = loop.scheduler.roster.alive[0], loop.plans[-1].rows
    assert row.q_len == 4
    assert len(row.pages) * 4 >= known.longest_kv(0)


@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0])
def test_trimming_leaks_no_page(accept):
    """Fault 53: after one speculated request everything is as at the start."""
    loop = speculate(accept, prefix_reuse=False)
    free = loop.scheduler.load().pages_free
    loop.ask("r", some_prompt(7), max_tokens=33, ignore_eos=True)
    most = 0
    while loop.scheduler.has_unfinished:
        loop.step()
        most = max(most, loop.scheduler.load().pages_held)
    loop.run()
    loop.verify()
    assert loop.scheduler.load().pages_free == free
    assert most <= -(-39 // 4)


def test_drafts_are_given_up_before_anybody_is_preempted():
    """Two sequences that fit the pool exactly finish without a preemption."""
    loop = speculate(0.3, num_pages=13)
    for i in range(2):
        loop.ask(f"r{i}", some_prompt(8, i), max_tokens=17, ignore_eos=True)
    loop.run()
    loop.verify()
    assert loop.scheduler.load().totals.preemptions == 0
