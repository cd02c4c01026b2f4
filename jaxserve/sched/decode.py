"""DecodePlanner: the one decode (or verify) call of a step: every ready row, with pages for its longest case.

When the pool is out it preempts, and it alone does."""

from __future__ import annotations

from jaxserve.config import SchedulerConfig
from jaxserve.sched.plan import Call, Row
from jaxserve.sched.roster import Roster
from jaxserve.sched.sequence import SequenceState

Ready = list[tuple[SequenceState, int]]  # with its q_len


class DecodePlanner:
    def __init__(self, config: SchedulerConfig, roster: Roster):
        self.config = config
        self.roster = roster
        self.queries = 1 + config.num_drafts

    def plan(self, now: float) -> Call | None:
        ready = self._ready()
        if self._shortage(ready) > self.roster.pool.available:
            ready = self._make_room(now)
        if not ready:
            return None
        rows = tuple([self._row(sequence, q_len) for sequence, q_len in ready])
        bucket = next(size for size in self.config.decode_buckets if size >= len(rows))
        self.roster.counters.decode_rows += len(rows)
        self.roster.counters.decode_padding += bucket - len(rows)
        return Call(rows=rows, rows_bucket=bucket, queries=self.queries)

    def _ready(self) -> Ready:
        """Rows past their prefill that may still add a token.  A length stop is never late: it follows from counts."""
        ready = []
        for sequence in self.roster.running.values():
            if sequence.computed < sequence.target:
                continue
            room = sequence.limit - sequence.shortest
            if room > 0:
                ready.append((sequence, min(self.queries if self._has_drafts(sequence) else 1, room)))
        return ready

    def _has_drafts(self, sequence: SequenceState) -> bool:
        """A draft that keeps K/V of its own can go on only from where the target stands."""
        return sequence.speculates and (not self.config.has_draft_pool or sequence.is_draft_level)

    def _missing(self, sequence: SequenceState, q_len: int) -> int:
        """Pages it lacks for the longest case."""
        return max(-(-sequence.longest_kv(q_len) // self.config.page_size) - len(sequence.pages), 0)

    def _shortage(self, ready: Ready) -> int:
        return sum([self._missing(sequence, q_len) for sequence, q_len in ready])

    def _make_room(self, now: float) -> Ready:
        """First drafts are given up, then the least important sequences, one by one, until the others fit."""
        roster = self.roster
        while True:
            ready = self._frugal()
            if self._shortage(ready) <= roster.pool.available:
                return ready
            victim = min(roster.running.values(), key=lambda s: (s.level(now, roster.config.age_seconds), -s.admitted))
            if len(roster.running) == 1:  # alone: nobody can give it a page
                return []
            roster.preempt(victim)

    def _frugal(self) -> Ready:
        """The ready rows with no more queries than their pages hold, one at the least.  A row that lacks a page only
        in case its unread drafts are accepted waits until they are read."""
        size, rows = self.config.page_size, []
        for sequence, q_len in self._ready():
            held = len(sequence.pages) * size
            if not self._missing(sequence, q_len):
                rows.append((sequence, q_len))
            elif not self._missing(sequence, 1):
                rows.append((sequence, held - sequence.longest_kv(0)))
            elif min(sequence.shortest, sequence.limit - 1) > held:
                rows.append((sequence, 1))
        return rows

    def _row(self, sequence: SequenceState, q_len: int) -> Row:
        missing = self._missing(sequence, q_len)
        if missing:
            sequence.pages += self.roster.pool.allocate(missing)
            sequence.row = None
        row, is_drafted = sequence.row, self.config.has_draft_pool and self._has_drafts(sequence)
        if row is None or (row.q_len, row.is_drafted) != (q_len, is_drafted):
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
                is_drafted=is_drafted,
            )
        sequence.plan_decode(q_len, is_drafted=is_drafted)
        return row
