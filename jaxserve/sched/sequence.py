"""SequenceState: one sample of one request, from `add` to its last chunk.

What the host knows of it, and what follows from that alone: bounds of its K/V length, which tokens count, what comes
back.  It never touches the pool or another sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.config import SchedulerConfig
from jaxserve.request import FinishReason, Request, TokenLogprobs, Usage, child_seed
from jaxserve.sched.pages import page_key, root_key
from jaxserve.sched.plan import Cut, Row, SlotLoad


@dataclass(frozen=True, slots=True)
class Ending:
    """How many of a step's tokens count, and what they end, if anything."""

    keep: int
    reason: FinishReason | None = None
    stop_reason: int | str | None = None


ALL_OF_ONE = Ending(1)


@dataclass(slots=True)
class Acceptance:
    """A moving estimate of the chance that a draft is right, given that those before it were."""

    accepted: float = 0.0
    tried: float = 0.0  # up to the first that was wrong: what stands behind it says nothing

    @property
    def mean(self) -> float:
        return self.accepted / self.tried

    def with_prior(self, mean: float, weight: float) -> float:
        return (self.accepted + weight * mean) / (self.tried + weight)

    def update(self, drafted: int, accepted: int, *, keep: float) -> None:
        """keep: how much of what it knew still counts."""
        self.accepted = self.accepted * keep + accepted
        self.tried = self.tried * keep + accepted + (accepted < drafted)


@dataclass(slots=True, eq=False)
class SequenceState:
    number: int  # unique for the scheduler's life
    request: Request
    prompt_len: int
    length: int  # tokens known: prompt_len + len(output), kept because every step of every row asks for it
    index: int  # which of the request's n samples
    arrival: float
    seed: int
    limit: int  # it ends when it holds this many tokens
    min_len: int  # no stop id counts before it holds this many
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]  # eos_ids included
    root: bytes  # the parent of its first page's key
    keys: list[bytes]  # of its full pages, as far as they may be shared and are named yet
    owes_prompt_logprobs: bool  # until they have been sent
    next_scored: int  # first prompt position whose logprob is wanted and not read yet; prompt_len = none
    output: list[int] = field(default_factory=list)  # tokens read

    epoch: int = 0  # an outcome row of an older epoch is dropped
    slot: int = -1  # -1 = waiting
    admitted: int = 0  # order of admission
    is_resumed: bool = False  # it ran before and was preempted
    pages: list[int] = field(default_factory=list)
    published: int = 0  # leading pages offered to the table, or taken from it
    claim: bytes | None = None  # the key it is computing for everybody
    blocked_on: bytes | None = None  # the key somebody else computes for it
    computed: int = 0  # positions whose prefill has been dispatched
    target: int = 0  # positions its prefill computes: all tokens known at admission
    reached: int = 0  # most positions ever computed: prefill below it is recompute, never a cache hit
    unread: int = 0  # steps that may add tokens and have not been read
    unread_most: int = 0  # tokens that they may add together
    row: Row | None = None  # its last decode row, as long as the next one is equal
    draft_len: int = 0  # the draft's own K/V stands at the positions below it, as far as the target's does

    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # those read, until they are sent
    cached_tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafts: int = 0  # proposals
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @staticmethod
    def samples(
        request: Request, config: SchedulerConfig, *, eos_ids: tuple[int, ...], first: int, now: float
    ) -> list[SequenceState]:
        """The n sequences of a request, numbered from `first`.  They share its prompt's page keys, hashed once here."""
        params, prompt_len = request.params, len(request.prompt_ids)
        assert params.seed is not None, "the engine seeds a request before it is added"
        most = config.max_len - prompt_len
        eos = frozenset(eos_ids if params.ends_at_eos else ())
        held_back = 0 if params.structured_outputs is not None else params.min_tokens  # by the mask, if there is one
        owes = params.prompt_logprobs is not None
        made = [
            SequenceState(
                number=first + index,
                request=request,
                prompt_len=prompt_len,
                length=prompt_len,
                index=index,
                arrival=now,
                seed=child_seed(params.seed, index),
                limit=prompt_len + (most if params.max_tokens is None else min(params.max_tokens, most)),
                min_len=prompt_len + held_back,
                eos_ids=eos,
                stop_ids=eos | frozenset(params.stop_token_ids),
                root=root_key(request.cache_salt),
                keys=[],
                owes_prompt_logprobs=owes,
                next_scored=min(max(params.prompt_logprobs_start, 1), prompt_len) if owes else prompt_len,
            )
            for index in range(params.n)
        ]
        if config.prefix_reuse:
            made[0].extend_keys(prompt_len, config.page_size)
            for sequence in made[1:]:
                sequence.keys = made[0].keys.copy()
        return made

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.target

    @property
    def speculates(self) -> bool:
        """Its request takes drafts."""
        return self.request.params.speculate

    @property
    def shortest(self) -> int:
        """Tokens the device holds at the least once it has done all unread steps: each adds one or more."""
        return self.length + self.unread

    def longest_kv(self, q_len: int) -> int:
        """Positions written at the most once the device has done all unread steps and one more of `q_len` queries.

        The newest token's K/V is not written yet, and a row at its limit is inert on the device."""
        return min(self.length - 1 + self.unread_most + q_len, self.limit - 1)

    @property
    def is_draft_level(self) -> bool:
        """Whether the draft's own K/V will stand wherever the target's does once the device has done all unread steps."""
        return self.draft_len >= self.longest_kv(0)

    def plan_tokens(self, most: int) -> None:
        """One more unread step, of up to so many tokens."""
        self.unread += 1
        self.unread_most += most

    def plan_decode(self, q_len: int, *, is_drafted: bool) -> None:
        """One more unread step, of up to `q_len` tokens.  Without its draft, the draft stays behind at the least position
        where this step may begin: what it has written past that are guesses that nobody confirmed."""
        if not is_drafted:
            self.draft_len = min(self.draft_len, self.shortest - 1)
        self.plan_tokens(q_len)
        if is_drafted:
            self.draft_len = self.longest_kv(0)

    def missing_pages(self, q_len: int, page_size: int) -> int:
        """Pages it lacks for the longest case of a step of `q_len` queries."""
        return max(-(-self.longest_kv(q_len) // page_size) - len(self.pages), 0)

    def steps_left(self, page_size: int) -> int:
        """Decode steps of one token that may follow the unread ones before it lacks a page or has reached its limit."""
        room, held = self.limit - self.shortest, len(self.pages) * page_size
        return room if self.limit - 1 <= held else min(room, held - self.longest_kv(0))

    def read(self, row: Row) -> None:
        """A step that might add tokens has been read."""
        self.unread -= 1
        self.unread_most -= row.q_len if row.start < 0 else 1

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens have been drawn, and count."""
        self.output += token_ids
        self.length += len(token_ids)

    def check(self) -> None:
        """Proves that what it keeps in two forms agrees.  For tests."""
        assert self.prompt_len == len(self.request.prompt_ids) and self.length == self.prompt_len + len(self.output)
        assert 0 <= self.unread <= self.unread_most, f"{self.unread} steps may add {self.unread_most} tokens"
        assert self.unread or not self.unread_most, f"nothing is unread, and may add {self.unread_most} tokens"

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        prompt, split = self.request.prompt_ids, self.prompt_len
        return (*prompt[start:stop], *self.output[max(start - split, 0) : max(stop - split, 0)])

    def extend_keys(self, length: int, page_size: int) -> None:
        """Names every full page of the first `length` tokens."""
        for index in range(len(self.keys), length // page_size):
            tokens = self.tokens(index * page_size, (index + 1) * page_size)
            self.keys.append(page_key(self.parent_of(index), tokens))

    def parent_of(self, index: int) -> bytes:
        return self.keys[index - 1] if index else self.root

    def level(self, now: float, age_seconds: float) -> int:
        """Its priority, raised by one for every `age_seconds` since it arrived."""
        return self.request.priority + int((now - self.arrival) // age_seconds)

    def load(self) -> SlotLoad:
        params = self.request.params
        return SlotLoad(
            slot=self.slot,
            tokens=(*self.request.prompt_ids, *self.output),
            prompt_len=self.prompt_len,
            limit=self.limit,
            min_len=self.min_len,
            stop_ids=tuple(sorted(self.stop_ids)),
            seed=self.seed,
            params=params,
        )

    def ending(self, token_ids: Sequence[int], cut: Cut | None) -> Ending:
        """Which of a step's tokens count.  The earliest end wins; at one and the same token a stop string, whose text
        is cut already, goes before a stop id, and that before the limit."""
        length = self.length
        if len(token_ids) == 1 and cut is None and token_ids[0] not in self.stop_ids and length + 1 < self.limit:
            return ALL_OF_ONE  # nearly every row of nearly every step
        for count, token_id in enumerate(token_ids, start=1):
            if cut is not None and cut.keep <= count:
                return Ending(cut.keep, FinishReason.STOP, cut.stop_reason)
            if token_id in self.stop_ids and length + count > self.min_len:
                return Ending(count, FinishReason.STOP, None if token_id in self.eos_ids else token_id)
            if length + count >= self.limit:
                return Ending(count, FinishReason.LENGTH)
        return Ending(len(token_ids))

    def score(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keeps prompt logprobs that have been read; entry i is that of the token at position `start + i`.  What is
        kept outlives a preemption."""
        if not self.prompt_logprobs:
            self.prompt_logprobs = [None] * self.prompt_len
        for position, entry in zip(range(start, self.prompt_len), logprobs, strict=False):
            self.prompt_logprobs[position] = entry
            self.next_scored = position + 1

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """All prompt logprobs, once, when the request wants them.  Entries before its start are None."""
        if not self.owes_prompt_logprobs:
            return None
        entries = tuple(self.prompt_logprobs or [None] * self.prompt_len)
        self.owes_prompt_logprobs, self.prompt_logprobs = False, []
        return entries

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=len(self.output),
            cached_tokens=self.cached_tokens,
            drafts=self.drafts,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
