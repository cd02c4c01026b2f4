"""How many drafts a decode call verifies.  Numbers only; no clock.

With drafts that are right with chance a each, a row takes 1 + a + ... + a^K = (1 - a^(K+1)) / (1 - a) tokens of a call
(Leviathan et al. 2023, section 3.3), which costs K c + v decode calls: c to propose one draft, v to verify.  So a call
takes the K at which its rows' tokens together are most for its cost, and none (plain decode) when no K gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxserve.config import SchedulerConfig, StepTime
from jaxserve.sched.looking import LookGain
from jaxserve.sched.plan import Call, Rung
from jaxserve.sched.sequence import Acceptance, SequenceState

FIRST_PROBE, LAST_PROBE = 16, 128  # plain calls between two probes: doubled after each that changed nothing
OWN_WEIGHT = 4.0  # tries of its own after which a row's estimate weighs as much as the mean of all


def tokens_expected(acceptance: float, drafts: int) -> float:
    """Of one call, for a row with so many drafts: (1 - a^(K+1)) / (1 - a)."""
    return drafts + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def choose(rungs: Sequence[Rung], hopes: Sequence[tuple[float, int]]) -> Rung:
    """The rung that gives most for its cost, the one with fewer drafts of equals.

    rungs: by drafts.  hopes: of each row, its acceptance and the drafts it has at the most."""

    def gain(rung: Rung) -> float:
        return sum([tokens_expected(a, min(rung.drafts, most)) for a, most in hopes]) / rung.cost

    return max(rungs, key=gain)


@dataclass(slots=True)
class StepCosts:
    """Seconds of each decode and verify program, as last seen.

    The machine's pace, which moves all of them, is followed quickly and each program's own share slowly: so one that
    has not run for a while keeps its place among the others."""

    seconds: dict[tuple[int, int], float]  # (rows, drafts) -> at pace 1
    look: float = 0.0  # that the device stands still in a call that looks for drafts, at pace 1
    pace: float = 1.0

    @staticmethod
    def of(times: Iterable[StepTime]) -> StepCosts:
        return StepCosts({(time.rows, time.drafts): time.total for time in times})

    def observe(self, shape: tuple[int, int], seconds: float, *, has_looked: bool = False) -> None:
        if shape not in self.seconds or seconds <= 0:
            return
        if has_looked and shape[1] == 0:
            over = seconds / self.pace - self.seconds[shape]
            self.look += 0.1 * (min(max(over, 0.0), self.seconds[shape]) - self.look)
            return
        if has_looked:
            seconds -= self.look * self.pace
        # One step may take any time on a busy machine; none moves anything by much.
        ratio = min(max(seconds / (self.pace * self.seconds[shape]), 0.5), 2.0)
        self.pace *= ratio**0.2
        self.seconds[shape] *= ratio**0.05


@dataclass(frozen=True, slots=True)
class Wish:
    """K of the next call, or its upper bound when drafts must be looked for first.  A probe counts every draft as right,
    to see what has become of them."""

    drafts: int
    is_probe: bool = False


class Speculation:
    """Which decode programs a call may take, by what drafts have gained so far."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.acceptance = Acceptance(accepted=2.4, tried=4.0)  # of all rows; begins with a guess worth four tries
        self.costs = StepCosts.of(config.step_times)
        self.wants_drafts = True  # they gain, or a probe is due
        self._looks = {rows: LookGain() for rows in config.decode_buckets}
        self._plain_calls = 0  # since the last that had drafts
        self._probe_after = FIRST_PROBE

    def rungs(self, rows: int, most: int) -> tuple[Rung, ...]:
        """Ways to run a call of so many rows, with at most so many drafts each.  Plain decode first."""
        config = self.config
        plain = next(size for size in config.decode_buckets if size >= rows)
        bucket = min((size for size, _ in config.verify_calls if size >= rows), default=0)
        shapes = [(plain, 0)]
        for shape in sorted(config.verify_calls, key=lambda shape: shape[1]):
            # The last one covers `most`.
            if shape[0] == bucket and shapes[-1][1] < most:
                shapes.append(shape)
        return tuple([Rung(*shape, self._cost(shape)) for shape in shapes])

    def _cost(self, shape: tuple[int, int]) -> float:
        """When the operator has chosen K, drafts are free: they are verified whenever there are any."""
        return self.costs.seconds.get(shape, 1.0) if self.config.is_adaptive else 1.0

    def wish(self, rows: Sequence[tuple[SequenceState, int]], *, is_level: bool) -> Wish:
        """For the next call.  rows: all of its sequences, each with the most drafts it may have, 0 = none.  is_level: the
        draft can make them for one of these rows at least; else a probe waits until it can."""
        most = max([drafts for _, drafts in rows], default=0)
        if not most:
            return Wish(0)
        rungs = self.rungs(len(rows), most)
        best = choose(rungs, [(self.expects(sequence), drafts) for sequence, drafts in rows])
        look = self._looks[rungs[0].rows] if self.config.is_lookup and self.config.is_adaptive else None
        if best.drafts and (look is None or look.is_worth_it):
            self.wants_drafts, self._plain_calls = True, 0
            if look is None or look.is_proven:
                self._probe_after = FIRST_PROBE
            return Wish(best.drafts)
        self._plain_calls += 1
        self.wants_drafts = self._plain_calls > self._probe_after
        if not (self.wants_drafts and is_level):
            return Wish(0)
        self._plain_calls, self._probe_after = 0, min(2 * self._probe_after, LAST_PROBE)
        if look is not None:
            look.begin_anew()
        return Wish(rungs[1].drafts, is_probe=True)

    def expects(self, sequence: SequenceState) -> float:
        """The chance that its next draft is right: its own estimate, drawn towards everybody's mean."""
        return sequence.acceptance.with_prior(self.acceptance.mean, OWN_WEIGHT) if self.config.is_adaptive else 1.0

    def observe_tokens(self, call: Call, shape: tuple[int, int], tokens: int) -> None:
        """What a decode call gave to all of its rows.  shape: (rows, drafts) of the program that ran."""
        if not (call.rungs and self.config.is_adaptive):
            return
        plain = call.rungs[0]
        cost = self._cost((plain.rows, 0))
        self._looks[plain.rows].update(tokens / len(call.rows), (self._cost(shape) + self.costs.look) / cost)

    def observe_draft(self, sequence: SequenceState, drafted: int, accepted: int) -> None:
        sequence.acceptance.update(drafted, accepted, keep=0.9)
        self.acceptance.update(drafted, accepted, keep=0.95)
