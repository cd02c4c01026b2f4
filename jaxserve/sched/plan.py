"""What the scheduler asks for and what comes back: frozen ints and tuples, nothing of the device.

A Plan is one step: slots to load, at most one prefill call, at most one decode (or verify) call, at most one prefill
call of a draft that keeps K/V of its own.  The runner turns it into arrays (`jaxserve.batch`); the Outcome carries what
was drawn, row by row in the plan's order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxserve.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """Reset `slot` entirely and give it to a sequence (first admission, resume after preemption, prefix hit alike)."""

    slot: int
    tokens: tuple[int, ...]  # prompt and the output read so far
    prompt_len: int
    limit: int  # the sequence ends when it holds this many tokens: min(prompt_len + max_tokens, max_len)
    min_len: int  # no stop id may be drawn before the sequence holds this many tokens
    stop_ids: tuple[int, ...]  # masked until min_len; the host decides what ends the sequence
    seed: int  # 64 bits, of this sequence
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a call."""

    sequence: int  # the sequence's number, unique for the scheduler's life
    epoch: int  # an outcome row of an older epoch is dropped
    slot: int
    start: int  # first position computed (prefill); -1 in decode: the slot knows
    q_len: int  # positions computed: chunk length, 1, or 1 + drafts
    pages: tuple[int, ...]
    takes_token: bool = True  # false for a chunk that is not the prompt's last, and for max_tokens = 0
    logprobs: int | None = None  # entries to return beside the drawn token's own
    masked: bool = False  # this row's sampler waits for a late mask
    has_stops: bool = False  # what it draws is searched for stop strings
    prompt_logprobs: int | None = None  # prefill: entries wanted for each position of this chunk
    prompt_logprobs_from: int = (
        0  # first position p of this chunk whose logits are wanted (they score the token at p + 1)
    )
    is_drafted: bool = False  # verify: a draft with K/V of its own runs along; it holds all that the target holds


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to run a decode call: a compiled number of rows, and of drafts that each row may have verified."""

    rows: int
    drafts: int  # K; 0 = plain decode
    cost: float  # of the whole call, in any unit that a call's rungs share


@dataclass(frozen=True)
class Call:
    """One compiled program's worth of rows; `rows_bucket` and `queries` name the program.

    With `rungs`, which of them runs is chosen when the rows' drafts are known (`jaxserve.sched.speculation.choose`); the
    call names the one with the most drafts."""

    rows: tuple[Row, ...]
    rows_bucket: int
    queries: int  # chunk for prefill, 1 for decode, K + 1 for verify
    rungs: tuple[Rung, ...] = ()  # by drafts, plain decode first
    acceptance: tuple[float, ...] = ()  # with rungs: of each row, the chance that its next draft is right

    @cached_property
    def is_masked(self) -> bool:
        return any(row.masked for row in self.rows)


@dataclass(frozen=True, slots=True)
class Plan:
    step: int
    loads: tuple[SlotLoad, ...] = ()
    prefill: Call | None = None
    decode: Call | None = None
    draft_prefill: Call | None = None  # after the other two; draws nothing and has no outcome

    @property
    def rows(self) -> tuple[Row, ...]:
        """Prefill rows, then decode rows: the order of `Outcome.rows`."""
        return (self.prefill.rows if self.prefill else ()) + (self.decode.rows if self.decode else ())

    @property
    def is_masked(self) -> bool:
        return any(call.is_masked for call in (self.prefill, self.decode) if call)


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one row drew: no token (not the last chunk, inert), one, or up to K + 1."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token, when the row asked
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of this chunk, when the row asked
    is_nan: bool = False  # the row's logits held a NaN: it ends with an error
    drafted: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    rows: tuple[RowOutcome, ...]
    decode_shape: tuple[int, int] | None = None  # rows and drafts (K) of the decode program that ran


@dataclass(frozen=True, slots=True)
class Cut:
    """A stop string was found (by the loop, which has the text): keep this many of the row's new tokens, then end."""

    keep: int
    stop_reason: str
