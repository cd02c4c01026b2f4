"""DecodePlanner: the one decode (or verify) call of a step: every ready row, with pages for its longest case.

When the pool is out it preempts, and it alone does."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import SchedulerConfig
from jaxserve.sched.plan import Call, Row
from jaxserve.sched.roster import Roster
from jaxserve.sched.sequence import SequenceState
from jaxserve.sched.speculation import Speculation, Wish

Candidates = list[tuple[SequenceState, int]]  # with the most drafts each may have
Ready = list[tuple[SequenceState, int]]  # with its q_len


@dataclass(slots=True)
class _Steady:
    """A decode call of everybody, one token each, and how often it may be made again while the roster's `moves` stand."""

    moves: int
    call: Call
    sequences: list[SequenceState]
    steps: int


class DecodePlanner:
    def __init__(self, config: SchedulerConfig, roster: Roster):
        self.config = config
        self.roster = roster
        self.speculation = Speculation(config)
        self._steady: _Steady | None = None

    def plan(self, now: float) -> Call | None:
        call = self._again() or self._new(now)
        if call is not None:
            self.roster.counters.decode_calls += 1
            self.roster.counters.decode_rows += len(call.rows)
            self.roster.counters.decode_padding += call.rows_bucket - len(call.rows)
        return call

    def _again(self) -> Call | None:
        """The last call once more: nothing has moved, every row has a page and may add a token."""
        last = self._steady
        if last is None or last.moves != self.roster.moves or not last.steps:
            return None
        last.steps -= 1
        for sequence in last.sequences:
            sequence.plan_tokens(1)
        return last.call

    def _new(self, now: float) -> Call | None:
        self._steady = None
        candidates = self._candidates()
        if self.config.num_drafts:
            is_level = any(drafts > 0 and self._is_level(sequence) for sequence, drafts in candidates)
            wish = self.speculation.wish(candidates, is_level=is_level)
            ready = self._with_queries(candidates, wish)
        else:
            wish, ready = Wish(0), [(sequence, 1) for sequence, _ in candidates]
        shortage = self._shortage(ready)
        if shortage > self.roster.pool.available:
            ready = self._make_room(now, wish)
        if not ready:
            return None
        if shortage:
            self._grow(ready)
        call = self._call(ready, wish)
        if not self.config.num_drafts and len(ready) == len(self.roster.running):
            sequences = [sequence for sequence, _ in ready]
            steps = min([sequence.steps_left(self.config.page_size) for sequence in sequences])
            self._steady = _Steady(self.roster.moves, call, sequences, steps)
        return call

    def _candidates(self) -> Candidates:
        """Rows past their prefill that may still add a token.  A length stop is never late: it follows from counts."""
        found, most = [], self.config.num_drafts
        for sequence in self.roster.running.values():
            if sequence.computed < sequence.target:
                continue
            room = sequence.limit - sequence.shortest
            if room > 0:
                found.append((sequence, min(most, room - 1) if most and sequence.speculates else 0))
        return found

    def _with_queries(self, candidates: Candidates, wish: Wish) -> Ready:
        """Rows whose draft is not level go without, whatever the wish."""
        return [
            (sequence, 1 + (min(drafts, wish.drafts) if self._is_level(sequence) else 0))
            for sequence, drafts in candidates
        ]

    def _call(self, ready: Ready, wish: Wish) -> Call:
        most = max([q_len for _, q_len in ready]) - 1
        rows = tuple([self._row(sequence, q_len, is_verified=most > 0) for sequence, q_len in ready])
        rungs = self.speculation.rungs(len(rows), most)
        last = rungs[-1]
        if last.drafts == 0 or not self.config.is_lookup:
            return Call(rows=rows, rows_bucket=last.rows, queries=1 + last.drafts)
        chances = [1.0 if wish.is_probe else self.speculation.expects(sequence) for sequence, _ in ready]
        return Call(rows=rows, rows_bucket=last.rows, queries=1 + last.drafts, rungs=rungs, acceptance=tuple(chances))

    def _is_level(self, sequence: SequenceState) -> bool:
        """A draft that keeps K/V of its own can go on only from where the target stands."""
        return not self.config.has_draft_pool or (sequence.speculates and sequence.is_draft_level)

    def _shortage(self, ready: Ready) -> int:
        size = self.config.page_size
        return sum([sequence.missing_pages(q_len, size) for sequence, q_len in ready])

    def _make_room(self, now: float, wish: Wish) -> Ready:
        """First drafts are given up, then the least important sequences, one by one, until the others fit."""
        roster = self.roster
        while True:
            ready = self._frugal(wish)
            if self._shortage(ready) <= roster.pool.available:
                return ready
            victim = min(roster.running.values(), key=lambda s: (s.level(now, roster.config.age_seconds), -s.admitted))
            if len(roster.running) == 1:  # alone: nobody can give it a page
                return []
            roster.preempt(victim)

    def _frugal(self, wish: Wish) -> Ready:
        """The ready rows with no more queries than their pages hold, one at the least.  A row that lacks a page only
        in case its unread drafts are accepted waits until they are read."""
        size, rows = self.config.page_size, []
        for sequence, q_len in self._with_queries(self._candidates(), wish):
            held = len(sequence.pages) * size
            if not sequence.missing_pages(q_len, size):
                rows.append((sequence, q_len))
            elif not sequence.missing_pages(1, size):
                rows.append((sequence, held - sequence.longest_kv(0)))
            elif min(sequence.shortest, sequence.limit - 1) > held:
                rows.append((sequence, 1))
        return rows

    def _grow(self, ready: Ready) -> None:
        """Gives every row the pages of its longest case."""
        for sequence, q_len in ready:
            if missing := sequence.missing_pages(q_len, self.config.page_size):
                sequence.pages += self.roster.pool.allocate(missing)
                sequence.row = None

    def _row(self, sequence: SequenceState, q_len: int, *, is_verified: bool) -> Row:
        row, is_drafted = sequence.row, is_verified and self.config.has_draft_pool and self._is_level(sequence)
        if row is None or row.q_len != q_len or row.is_drafted != is_drafted:
            request = sequence.request
            row = sequence.row = Row(
                sequence=sequence.number,
                epoch=sequence.epoch,
                slot=sequence.slot,
                start=-1,
                q_len=q_len,
                pages=tuple(sequence.pages),
                logprobs=request.params.logprobs,
                masked=request.make_mask is not None,
                has_stops=bool(request.params.stop),
                is_drafted=is_drafted,
            )
        sequence.plan_decode(q_len, is_drafted=is_drafted)
        return row
