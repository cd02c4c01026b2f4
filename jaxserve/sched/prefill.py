"""PrefillPlanner: the one prefill call of a step: whose chunks, in which compiled shape.

It admits sequences (a slot, and pages for all their tokens) and never preempts one.  Sequences that already run go
before those that wait."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import SchedulerConfig
from jaxserve.sched.plan import Call, Row, SlotLoad
from jaxserve.sched.roster import Roster
from jaxserve.sched.sequence import SequenceState

# Reading the weights once costs about as much as computing this many tokens; used until bucket times are measured.
CALL_OVERHEAD = 64


@dataclass(frozen=True, slots=True)
class Bucket:
    rows: int
    chunk: int
    cost: float  # seconds when measured, else tokens

    def useful(self, lengths: list[int]) -> int:
        """Tokens it would compute of prompts with this many left, taken in order."""
        return sum([min(length, self.chunk) for length in lengths[: self.rows]])


class PrefillPlanner:
    def __init__(self, config: SchedulerConfig, roster: Roster):
        self.config = config
        self.roster = roster
        seconds = config.prefill_seconds
        costs = seconds or [rows * chunk for rows, chunk in config.prefill_buckets]
        every = [Bucket(rows, chunk, cost) for (rows, chunk), cost in zip(config.prefill_buckets, costs, strict=True)]
        quick = [bucket for bucket in every if not seconds or bucket.cost <= config.max_decode_wait]
        # A call also holds up the decode call of its step, which reads the weights once, like the smallest prefill.
        self._overhead = min(seconds) if seconds else CALL_OVERHEAD
        self._every = every
        self._quick = quick or [min(every, key=lambda bucket: bucket.cost)]
        self._most_rows = max(bucket.rows for bucket in every)
        self._settled = -1  # the roster's `moves` when all that run were past their prefill

    def plan(self) -> tuple[tuple[SlotLoad, ...], Call | None]:
        candidates = self._candidates()
        if not candidates:
            return (), None
        is_streaming = any(not sequence.is_prefilling for sequence in self.roster.running.values())
        buckets = self._quick if is_streaming else self._every
        bucket, chosen = self._choose(buckets, candidates)
        for sequence, _ in candidates:
            if sequence.slot < 0 and sequence not in chosen:
                self.roster.unclaim(sequence)
        loads = tuple([self.roster.admit(sequence) for sequence in chosen if sequence.slot < 0])
        rows = tuple([self._row(sequence, bucket.chunk) for sequence in chosen])
        # Only now: what one row of a call computes is for the rows of later calls.
        for sequence in chosen:
            self._move_on(sequence)
        useful = sum([row.q_len for row in rows])
        self.roster.counters.prefill_tokens += useful
        self.roster.counters.prefill_padding += bucket.rows * bucket.chunk - useful
        return loads, Call(rows=rows, rows_bucket=bucket.rows, queries=bucket.chunk)

    def _candidates(self) -> list[tuple[SequenceState, int]]:
        """Who could have a row, with the tokens it has left, in order: as many as a call has rows, and long ones."""
        found = self._begun() if self._settled != self.roster.moves else []
        if not self.roster.waiting:
            return found
        longest = max(bucket.chunk for bucket in self._every)
        places = self._most_rows - sum([left <= longest for _, left in found])
        found += self._newcomers(places, longest)
        return found

    def _begun(self) -> list[tuple[SequenceState, int]]:
        """Those that run already."""
        prefilling = [sequence for sequence in self.roster.running.values() if sequence.is_prefilling]
        if not prefilling:
            self._settled = self.roster.moves
        found = []
        for sequence in prefilling:
            self.roster.rematch(sequence)
            if self.roster.claim(sequence, sequence.computed // self.config.page_size):
                found.append((sequence, sequence.target - sequence.computed))
        return found

    def _newcomers(self, places: int, longest: int) -> list[tuple[SequenceState, int]]:
        """Who could be admitted.  Who waits for a page that another computes is passed over; who finds too few pages
        holds everybody behind it back, or long prompts would wait for ever."""
        roster, found = self.roster, []
        slots, size = len(roster.free_slots), self.config.page_size
        room = self._room()
        for sequence in roster.waiting:
            if places <= 0 or len(found) >= slots:
                break
            if sequence.blocked_on is not None and roster.pool.claimed_by(sequence.blocked_on) is not None:
                continue
            hits = roster.count_hits(sequence)
            wanted = roster.pages_wanted(sequence, hits)
            if wanted > room:
                break
            if roster.claim(sequence, hits):
                left = sequence.length - hits * size
                found.append((sequence, left))
                places -= left <= longest
                room -= wanted + 1
        return found

    def _room(self) -> int:
        """Pages for newcomers.  One per running row stays free, so that nobody is admitted (again) only to be preempted
        within a few steps, and computed again for nothing."""
        return self.roster.pool.available - len(self.roster.running)

    def _choose(
        self, buckets: list[Bucket], candidates: list[tuple[SequenceState, int]]
    ) -> tuple[Bucket, list[SequenceState]]:
        """The bucket that computes most for its cost, the larger one of equals, and its rows.

        While others wait, one row at most belongs to a prompt too long for any single call, and such a prompt never
        has a call to itself."""
        longest = max(bucket.chunk for bucket in buckets)
        first_long = next((sequence for sequence, left in candidates if left > longest), None)
        order = sorted(candidates, key=lambda item: item[1] > longest and item[0] is not first_long)
        if order[0][0] is first_long and len(order) > 1 and order[1][1] <= longest:
            buckets = [bucket for bucket in buckets if bucket.rows > 1] or buckets
        best = self._best(buckets, [left for _, left in order])
        return best, [sequence for sequence, _ in order[: best.rows]]

    def _best(self, buckets: list[Bucket], lengths: list[int]) -> Bucket:
        return max(buckets, key=lambda b: (b.useful(lengths) / (b.cost + self._overhead), b.useful(lengths), -b.rows))

    def shape_beside_decode(self, lengths: list[int]) -> tuple[int, int]:
        """(rows, chunk) of a call for rows that stream already and have this many positions left to compute."""
        best = self._best(self._quick, lengths)
        return best.rows, best.chunk

    def _row(self, sequence: SequenceState, chunk: int) -> Row:
        request, start = sequence.request, sequence.computed
        stop = min(start + chunk, sequence.target)
        takes_token = sequence.target == stop < sequence.limit
        scored_from = max(start, sequence.next_scored - 1)
        is_scored = scored_from < min(stop, sequence.prompt_len - 1)
        sequence.computed = stop
        self.roster.counters.recomputed_tokens += max(min(stop, sequence.reached) - start, 0)
        if takes_token:
            sequence.plan_tokens(1)
        return Row(
            sequence=sequence.number,
            epoch=sequence.epoch,
            slot=sequence.slot,
            start=start,
            q_len=stop - start,
            pages=tuple(sequence.pages),
            takes_token=takes_token,
            logprobs=request.params.logprobs if takes_token else None,
            masked=takes_token and request.make_mask is not None,
            has_stops=bool(request.params.stop),
            prompt_logprobs=request.params.prompt_logprobs if is_scored else None,
            prompt_logprobs_from=scored_from if is_scored else 0,
        )

    def _move_on(self, sequence: SequenceState) -> None:
        """Its chunk is about to be dispatched: the pages it fills may be shared, and it claims the next one."""
        self.roster.publish(sequence, sequence.computed)
        self.roster.unclaim(sequence)
        if sequence.is_prefilling:
            self.roster.claim(sequence, sequence.computed // self.config.page_size)
