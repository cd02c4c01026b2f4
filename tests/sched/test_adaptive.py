"""How many drafts a call verifies: by the walltime formula, off when none gain, and no token depends on it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import SchedulerConfig, StepTime
from jaxserve.sched.looking import LookGain
from jaxserve.sched.plan import Rung
from jaxserve.sched.sequence import Acceptance
from jaxserve.sched.speculation import StepCosts, choose, tokens_expected
from tests.fakes import FakeDevice
from tests.sched.harness import VOCAB, Loop, make_config, some_prompt
from tests.sched.traces import Trace

SHAPES = ((2, 3), (2, 7), (4, 3))  # (rows, K)


def step_times(verify: float, propose: float = 0.0) -> tuple[StepTime, ...]:
    """One decode step takes 1, a verify call `verify` for every draft on top, a draft `propose`."""
    decode = [StepTime(rows=rows, drafts=0, propose=0, verify=1) for rows in (2, 4)]
    return (*decode, *(StepTime(rows=r, drafts=k, propose=k * propose, verify=1 + k * verify) for r, k in SHAPES))


def adaptive(verify: float, *, is_lookup: bool = False, **changes) -> SchedulerConfig:
    return make_config(
        num_drafts=7, verify_shapes=SHAPES, is_adaptive=True, is_lookup=is_lookup, step_times=step_times(verify),
        **changes,
    )  # fmt: skip


def run(config: SchedulerConfig, accept: float, *, requests: int = 12) -> Loop:
    loop = Loop(config, device=FakeDevice(config, vocab=VOCAB, accept=accept))
    for i in range(requests):
        loop.ask(f"r{i}", some_prompt(4, i), max_tokens=40, ignore_eos=True)
    loop.run()
    loop.verify()
    return loop


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_the_tokens_expected_of_a_call_are_those_of_a_coin_thrown_until_it_fails(acceptance, drafts):
    coin, throws, tokens = random.Random(1), 20000, 0
    for _ in range(throws):
        tokens += 1
        for _ in range(drafts):
            if coin.random() >= acceptance:
                break
            tokens += 1
    assert tokens_expected(acceptance, drafts) == pytest.approx(tokens / throws, rel=0.02)


@settings(max_examples=200)
@given(
    costs=st.lists(st.floats(0.5, 5), min_size=3, max_size=3),
    hopes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 15)), min_size=1, max_size=8),
)
def test_no_other_number_of_drafts_promises_more_for_its_cost(costs, hopes):
    rungs = [Rung(8, drafts, 1 + cost) for drafts, cost in zip((3, 7, 15), costs, strict=True)]
    rungs.insert(0, Rung(8, 0, 1.0))

    def rate(rung: Rung) -> float:
        return sum(sum(a**i for i in range(min(rung.drafts, most) + 1)) for a, most in hopes) / rung.cost

    assert rate(choose(rungs, hopes)) >= max(map(rate, rungs)) - 1e-9


def test_rows_without_drafts_run_plain_decode():
    rungs = [Rung(4, 0, 1.0), Rung(4, 3, 1.0)]
    assert choose(rungs, [(1.0, 0), (1.0, 0)]).drafts == 0
    assert choose(rungs, [(1.0, 0), (1.0, 1)]).drafts == 3


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
def test_the_estimate_finds_the_chance_whatever_the_number_of_drafts(chance):
    """Counting accepted by drafted would not: what stands behind the first wrong draft is never tried."""
    coin, estimate = random.Random(2), Acceptance(accepted=2.4, tried=4.0)
    for _ in range(3000):
        drafted = coin.choice((1, 3, 7, 15))
        accepted = next((i for i in range(drafted) if coin.random() >= chance), drafted)
        estimate.update(drafted, accepted, keep=0.998)
    assert estimate.mean == pytest.approx(chance, abs=0.03)


@pytest.mark.parametrize("is_lookup", [False, True])
def test_speculation_slower_than_none_switches_itself_off_and_the_counters_show_it(is_lookup):
    """Fault 52."""
    totals = run(adaptive(0.3, is_lookup=is_lookup), accept=0.05).scheduler.load().totals
    assert totals.verify_calls < totals.decode_calls / 6
    totals = run(adaptive(0.05, is_lookup=is_lookup), accept=0.9).scheduler.load().totals
    assert totals.verify_calls > totals.decode_calls / (3 if is_lookup else 1.1)


def test_speculation_that_was_off_comes_back_when_drafts_are_right_again():
    config = adaptive(0.1)
    loop = run(config, accept=0.0)
    loop.device.accept = 1.0
    for i in range(60):
        loop.ask(f"s{i}", some_prompt(4, i), max_tokens=40, ignore_eos=True)
    before = loop.scheduler.load().totals
    loop.run()
    after = loop.scheduler.load().totals
    assert after.verify_calls - before.verify_calls > (after.decode_calls - before.decode_calls) / 2


def test_one_row_takes_more_drafts_than_many():
    """Few rows leave room beside the weights: only two rows have a program for seven drafts."""
    one = run(adaptive(0.02), 1.0, requests=1).plans
    many = run(adaptive(0.02), 1.0).plans
    assert max(plan.decode.queries for plan in one if plan.decode) == 8
    assert max(plan.decode.queries for plan in many if plan.decode and len(plan.decode.rows) > 2) == 4


def test_a_slow_minute_moves_every_cost_and_a_slow_program_its_own():
    costs = StepCosts.of(step_times(0.1))
    for _ in range(200):
        costs.observe((4, 0), 3.0)  # the machine is busy, and nothing but this runs
    ratio = costs.seconds[4, 3] / costs.seconds[4, 0]
    assert ratio == pytest.approx(1.3, rel=0.3)
    for _ in range(600):
        costs.observe((4, 0), 1.0)
        costs.observe((4, 3), 2.6)
    assert costs.seconds[4, 3] / costs.seconds[4, 0] == pytest.approx(2.6, rel=0.05)


@pytest.mark.parametrize("is_lookup", [False, True])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), verify=st.sampled_from((0.01, 0.1, 0.4)), num_pages=st.sampled_from((14, 18, 40)))
def test_varying_numbers_of_drafts_lose_no_page_and_change_no_token(is_lookup, seed, verify, num_pages):
    """Accept, reject, abort and preempt: the loop checks pages after every step and tokens at the end."""
    Trace(seed, 7, adaptive(verify, is_lookup=is_lookup, num_pages=num_pages)).play()


def test_looking_stops_where_its_calls_take_longer_than_plain_decode_and_is_tried_again():
    """What a look costs is in no program's time: the device waits for the host.  Its calls are weighed by all they took."""
    gain = LookGain()
    assert gain.is_worth_it and not gain.is_proven
    calls = 0
    while gain.is_worth_it:
        gain.update(tokens=1.0, plain_calls=1.15)
        calls += 1
    assert calls <= 5
    gain.begin_anew()
    for _ in range(20):
        gain.update(tokens=1.4, plain_calls=1.2)
    assert gain.is_proven


def test_a_call_that_looked_in_vain_makes_plain_decode_no_dearer():
    costs = StepCosts.of(step_times(0.1))
    for _ in range(200):
        costs.observe((4, 0), 1.2, has_looked=True)
        costs.observe((4, 3), 1.5, has_looked=True)
        costs.observe((4, 0), 1.0)
    assert costs.seconds[4, 0] * costs.pace == pytest.approx(1.0, rel=0.02)
    assert costs.seconds[4, 3] * costs.pace == pytest.approx(1.3, rel=0.02)
    assert costs.look * costs.pace == pytest.approx(0.2, rel=0.02)


def test_calls_that_would_gain_but_for_their_looks_seldom_look():
    """By the formula every call gains; each look makes the device wait for as long as five plain calls."""
    looked = {}
    for look in (0.0, 5.0):
        config = adaptive(0.05, is_lookup=True)
        loop = Loop(config, device=FakeDevice(config, vocab=VOCAB, accept=0.9))
        speculation = loop.scheduler._decode.speculation
        for i in range(12):
            loop.ask(f"r{i}", some_prompt(4, i), max_tokens=40, ignore_eos=True)
        while loop.scheduler.has_unfinished:
            speculation.costs.look = look
            loop.step()
        loop.verify()
        decodes = [plan.decode for plan in loop.plans if plan.decode]
        looked[look] = sum(bool(call.rungs) for call in decodes) / len(decodes)
    assert looked[0.0] > 0.8
    assert 0 < looked[5.0] < 0.25
