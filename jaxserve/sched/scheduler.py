"""Scheduler: which tokens to compute next, and what has come of them.

Host numbers only: no jax, no clock, no threads; time is passed in.  The loop calls `schedule` for step n+1 before it
has read step n, so a plan rests on what is *known* (tokens read) and on bounds for what is *unread*; both are kept in
each SequenceState and nothing is ever guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxserve.config import SchedulerConfig
from jaxserve.request import Chunk, ErrorCode, FinishReason, Request, RequestError, TokenLogprobs
from jaxserve.sched.counters import Counters, SchedulerLoad
from jaxserve.sched.decode import DecodePlanner
from jaxserve.sched.drafting import DraftPlanner
from jaxserve.sched.plan import Cut, Outcome, Plan, Row, RowOutcome
from jaxserve.sched.prefill import PrefillPlanner
from jaxserve.sched.roster import Roster
from jaxserve.sched.sequence import SequenceState

NO_TEXTS: Mapping[int, str] = {}


class Scheduler:
    """Every accepted sequence ends exactly once, with one chunk that carries finish_reason and usage."""

    def __init__(self, config: SchedulerConfig, eos_ids: tuple[int, ...], counters: Counters | None = None):
        """counters: to go on from; None = new ones."""
        _check_buckets(config)
        self.config = config
        self.eos_ids = eos_ids
        self.roster = Roster(config, counters or Counters())
        self._decode = DecodePlanner(config, self.roster)
        self._prefill = PrefillPlanner(config, self.roster)
        self._drafting = DraftPlanner(config, self.roster, self._prefill)
        self._requests: dict[str, list[SequenceState]] = {}  # id -> its living sequences
        self._sequences_made = 0
        self._unread_steps = 0
        self._next_deadline = math.inf
        self._last_commit = 0.0
        self._was_queued = False  # at the last commit the next step had been dispatched
        self._ended: list[Chunk] = []  # ended outside a commit, not handed out yet

    # What the callers want.

    def add(self, request: Request, now: float) -> None:
        """Queues the n sequences of a request, or raises RequestError and leaves everything as it was."""
        self._check(request)
        sequences = SequenceState.samples(
            request, self.config, eos_ids=self.eos_ids, first=self._sequences_made, now=now
        )
        self._sequences_made += len(sequences)
        self._requests[request.id] = sequences
        for sequence in sequences:
            self.roster.enlist(sequence)
        self.roster.counters.sequences += len(sequences)
        self.roster.counters.prompt_tokens += len(request.prompt_ids) * len(sequences)
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def _check(self, request: Request) -> None:
        prompt_len, waiting, limit = len(request.prompt_ids), len(self.roster.waiting), self.config.queue_limit
        if request.id in self._requests:
            raise RequestError(
                f"a request with id {request.id!r} is still running", code=ErrorCode.ALREADY_EXISTS, field="id"
            )
        if not prompt_len:
            raise RequestError("the prompt is empty: it must hold at least one token", field="prompt")
        if prompt_len >= self.config.max_len:
            raise RequestError(
                f"the prompt has {prompt_len} tokens; with max_len={self.config.max_len}"
                f" it may have at most {self.config.max_len - 1}",
                field="prompt",
            )
        if waiting + request.params.n > limit:
            raise RequestError(
                f"the queue is full: {waiting} sequences wait, {request.params.n} more would pass the limit of {limit}",
                code=ErrorCode.RESOURCE_EXHAUSTED,
            )

    def abort(self, request_id: str) -> bool:
        """Ends all living sequences of a request; their last chunks come with the next `commit` or `drain`."""
        sequences = list(self._requests.get(request_id, ()))
        for sequence in sequences:
            self._ended.append(self._end(sequence, FinishReason.ABORT))
        return bool(sequences)

    def abort_all(self) -> list[Chunk]:
        """Ends everything, at a shutdown."""
        for request_id in list(self._requests):
            self.abort(request_id)
        return self.drain()

    def fail_all(self, error: str) -> list[Chunk]:
        """The loop died: every stream ends with this error."""
        for sequence in list(self.roster.alive.values()):
            self._ended.append(self._end(sequence, FinishReason.ERROR, error=error))
        return self.drain()

    def fail(self, row: Row, error: str, code: ErrorCode) -> None:
        """Ends the sequence of a planned row; its last chunk comes like an abort's."""
        sequence = self.current(row)
        if sequence is not None:
            self._ended.append(self._end(sequence, FinishReason.ERROR, error=error, error_code=code))

    def drain(self) -> list[Chunk]:
        """Last chunks of what ended outside a commit: aborts, deadlines, a pool that is too small."""
        ended, self._ended = self._ended, []
        return ended

    # One step.

    def schedule(self, now: float) -> Plan | None:
        """The next step, to be dispatched at once and in order; None when every row waits for a step to be read."""
        self._expire(now)
        while True:
            decode = self._decode.plan(now)  # first, so a prompt that ends in this step decodes in the next
            loads, prefill = self._prefill.plan()
            if decode or prefill:
                self._unread_steps += 1
                self.roster.counters.steps += 1
                draft_prefill = self._drafting.plan(prefill) if self._wants_drafts else None
                return Plan(
                    step=self.roster.counters.steps, loads=loads, prefill=prefill, decode=decode,
                    draft_prefill=draft_prefill,
                )  # fmt: skip
            if self._unread_steps or not self.roster.alive:
                return None
            self._end_too_large()

    @property
    def _wants_drafts(self) -> bool:
        """A draft with K/V of its own falls behind while none gains, and computes nothing."""
        return self.config.has_draft_pool and self._decode.speculation.wants_drafts

    def commit(
        self, plan: Plan, outcome: Outcome, cuts: Mapping[int, Cut], now: float, texts: Mapping[int, str] = NO_TEXTS
    ) -> list[Chunk]:
        """What a step has drawn: the chunks of its rows, and of all that ended elsewhere since the last call.

        Steps are committed in the order of their plans.  `cuts` names the rows (by sequence) whose text met a stop
        string; `texts` holds what rows have added to theirs, where the caller has decoded it."""
        self._unread_steps -= 1
        self._observe(plan, outcome, now)
        chunks = self.drain()
        for row, drawn in zip(plan.rows, outcome.rows, strict=True):
            sequence = self.current(row)
            if sequence is not None:
                chunk = self._read(sequence, row, drawn, cuts.get(row.sequence))
                if chunk is not None:
                    if row.has_stops:
                        chunk.text = texts.get(row.sequence)
                    chunks.append(chunk)
        self._expire(now)
        return chunks + self.drain() if self._ended else chunks

    def _observe(self, plan: Plan, outcome: Outcome, now: float) -> None:
        """What a step has told of speculation: its time, when it ran decode alone and waited for nothing but the device,
        and which program it was."""
        if self.config.num_drafts and outcome.decode_shape is not None and plan.decode is not None:
            speculation = self._decode.speculation
            if self._was_queued and plan.prefill is None:
                speculation.costs.observe(
                    outcome.decode_shape, now - self._last_commit, has_looked=bool(plan.decode.rungs)
                )
            drawn = outcome.rows[-len(plan.decode.rows) :]
            speculation.observe_tokens(plan.decode, outcome.decode_shape, sum([len(row.token_ids) for row in drawn]))
            self.roster.counters.verify_calls += outcome.decode_shape[1] > 0
        # What the draft computes of prompts comes after the step's tokens, and holds up the next one's.
        self._last_commit, self._was_queued = now, self._unread_steps > 0 and plan.draft_prefill is None

    def current(self, row: Row) -> SequenceState | None:
        """The sequence of an outcome row, unless it has ended or been preempted since the row was planned."""
        sequence = self.roster.alive.get(row.sequence)
        return sequence if sequence is not None and sequence.epoch == row.epoch else None

    def _read(self, sequence: SequenceState, row: Row, drawn: RowOutcome, cut: Cut | None) -> Chunk | None:
        if row.takes_token:
            sequence.read(row)
        if drawn.is_nan:
            self.roster.counters.nan_rows += 1
            self.roster.pool.forget(sequence.pages)
            return self._end(sequence, FinishReason.ERROR, error="the model computed NaN for this sequence")
        if drawn.prompt_logprobs is not None:
            sequence.score(row.prompt_logprobs_from + 1, drawn.prompt_logprobs)
        if not row.takes_token:
            is_done = row.start + row.q_len == sequence.limit  # max_tokens=0: the prompt was all there is to compute
            return self._end(sequence, FinishReason.LENGTH) if is_done else None
        ending = sequence.ending(drawn.token_ids, cut)
        token_ids = drawn.token_ids[: ending.keep]
        self._append(sequence, row, drawn, token_ids)
        logprobs = None if drawn.logprobs is None else drawn.logprobs[: ending.keep]
        if ending.reason is not None:
            return self._end(
                sequence, ending.reason, token_ids=token_ids, logprobs=logprobs, stop_reason=ending.stop_reason
            )
        if not token_ids:
            return None
        return Chunk(
            request_id=sequence.request.id,
            index=sequence.index,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=sequence.take_prompt_logprobs(),
        )

    def _append(self, sequence: SequenceState, row: Row, drawn: RowOutcome, token_ids: tuple[int, ...]) -> None:
        """Tokens are known: their pages may get keys, and pages kept for drafts that were rejected come back."""
        sequence.append(token_ids)
        counters = self.roster.counters
        counters.output_tokens += len(token_ids)
        if drawn.drafted:
            accepted = min(len(token_ids), len(drawn.token_ids) - 1)
            sequence.drafts += 1
            sequence.drafted_tokens += drawn.drafted
            sequence.accepted_tokens += accepted
            counters.count_proposal(drawn.drafted, accepted)
            self._decode.speculation.observe_draft(sequence, drawn.drafted, len(drawn.token_ids) - 1)
        self.roster.publish_output(sequence)
        if len(token_ids) < row.q_len and row.start < 0:
            self.roster.trim(sequence)

    # The one place where a sequence ends.

    def _end(
        self,
        sequence: SequenceState,
        reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
        error_code: ErrorCode = ErrorCode.INTERNAL,
    ) -> Chunk:
        self.roster.remove(sequence)
        siblings = self._requests[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.id]
        self.roster.counters.count_ending(reason)
        is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
        return Chunk(
            request_id=sequence.request.id,
            index=sequence.index,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=sequence.take_prompt_logprobs() if is_complete else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=sequence.usage(),
            error=error,
            error_code=error_code,
            seed=sequence.request.params.seed,
        )

    def _expire(self, now: float) -> None:
        """Aborts what is past its deadline.  Looks at the sequences only when the earliest deadline has come."""
        if now < self._next_deadline:
            return
        self._next_deadline = math.inf
        for sequence in list(self.roster.alive.values()):
            deadline = sequence.request.deadline
            if deadline is None:
                continue
            if now < deadline:
                self._next_deadline = min(self._next_deadline, deadline)
                continue
            error = f"deadline passed {now - sequence.arrival:.3f} s after the request arrived"
            self._ended.append(self._end(sequence, FinishReason.ABORT, error=error))

    def _end_too_large(self) -> None:
        """The last guard: nothing is unread, nobody can be given a page.  Only a pool smaller than one sequence does
        that."""
        roster, pool = self.roster, self.roster.pool
        sequence = next(iter(roster.running.values()), None) or next(iter(roster.waiting))
        error = (
            f"the page pool ({pool.total} pages of {self.config.page_size} tokens, {pool.available} available)"
            f" cannot hold this sequence of {sequence.length} tokens"
        )
        self._ended.append(self._end(sequence, FinishReason.ERROR, error=error))

    # What the loop may ask.

    @property
    def has_unfinished(self) -> bool:
        return bool(self.roster.alive)

    def is_alive(self, number: int) -> bool:
        """Whether a sequence has not ended: it runs or waits."""
        return number in self.roster.alive

    def load(self) -> SchedulerLoad:
        roster, pool = self.roster, self.roster.pool
        return SchedulerLoad(
            running=len(roster.running),
            waiting=len(roster.waiting),
            slots=self.config.slots,
            pages_total=pool.total,
            pages_free=pool.free,
            pages_cached=pool.cached,
            pages_held=pool.held,
            totals=roster.counters.copy(),
        )

    def check(self) -> None:
        """Proves that nothing is lost or shared by mistake.  For tests: it walks everything."""
        self.roster.check()
        living = [sequence for sequences in self._requests.values() for sequence in sequences]
        assert sorted(sequence.number for sequence in living) == sorted(self.roster.alive)


def _check_buckets(config: SchedulerConfig) -> None:
    if not config.decode_buckets or max(config.decode_buckets) < config.slots:
        raise ValueError(
            f"decode_buckets={config.decode_buckets} cannot hold slots={config.slots}: all ready rows decode together"
        )
    if not config.prefill_buckets:
        raise ValueError("prefill_buckets is empty: no prompt could be computed")
    if config.prefill_seconds and len(config.prefill_seconds) != len(config.prefill_buckets):
        raise ValueError(
            f"prefill_seconds has {len(config.prefill_seconds)} times for {len(config.prefill_buckets)} prefill_buckets"
        )
