"""DraftPlanner: the one prefill call of a step for a draft that keeps K/V of its own.

The draft computes what the target computes of prompts, in the same step, and catches up on what it has missed: pages
that a request without drafts has left, steps that ran without it.  Until it is level a row goes without drafts."""

from __future__ import annotations

from jaxserve.config import SchedulerConfig
from jaxserve.sched.plan import Call, Row
from jaxserve.sched.prefill import PrefillPlanner
from jaxserve.sched.roster import Roster
from jaxserve.sched.sequence import SequenceState


class DraftPlanner:
    def __init__(self, config: SchedulerConfig, roster: Roster, prefill: PrefillPlanner):
        self.config = config
        self.roster = roster
        self._prefill = prefill

    def plan(self, prefill: Call | None) -> Call | None:
        """prefill: the target's own of this step, planned already, as is its decode call.  Both go first."""
        behind = self._behind({row.sequence for row in prefill.rows} if prefill else set())
        if not behind:
            return None
        if prefill:  # one shape for both: what the two cost together was measured
            rows, chunk = prefill.rows_bucket, prefill.queries
        else:
            rows, chunk = self._prefill.shape_beside_decode([left for _, left in behind])
        chosen = tuple([self._row(sequence, min(left, chunk)) for sequence, left in behind[:rows]])
        self.roster.counters.draft_prefill_tokens += sum([row.q_len for row in chosen])
        return Call(rows=chosen, rows_bucket=rows, queries=chunk)

    def _behind(self, first: set[int]) -> list[tuple[SequenceState, int]]:
        """Sequences that want drafts, with the positions they lack; those of the target's call go first,
        then whoever lacks least: drafts gain as soon as one row is level."""
        found = []
        for sequence in self.roster.running.values():
            if not sequence.speculates or sequence.limit - sequence.shortest < 2:  # no step of it can hold a draft
                continue
            written = sequence.computed if sequence.is_prefilling else sequence.shortest - 1
            self.roster.find_drafted(sequence, written)
            if written > sequence.draft_len:
                found.append((sequence, written - sequence.draft_len))
        return sorted(found, key=lambda item: (item[0].number not in first, item[1]))

    def _row(self, sequence: SequenceState, count: int) -> Row:
        start = sequence.draft_len
        self.roster.advance_draft(sequence, start + count)
        return Row(
            sequence=sequence.number,
            epoch=sequence.epoch,
            slot=sequence.slot,
            start=start,
            q_len=count,
            pages=tuple(sequence.pages),
            takes_token=False,
        )
