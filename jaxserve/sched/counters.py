"""What the scheduler counts, and the view of its load that others may read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate

from jaxserve.config import MAX_DRAFTS
from jaxserve.request import FinishReason


@dataclass(slots=True)
class Counters:
    """Totals since the process began; none ever falls, so they outlive a scheduler."""

    steps: int = 0
    sequences: int = 0  # accepted; at idle each has ended once
    prompt_tokens: int = 0  # of accepted requests, once per sample
    output_tokens: int = 0
    prefix_query_tokens: int = 0  # prompt tokens that were looked up in the table, hits among them
    prefix_hit_tokens: int = 0  # prompt tokens taken from the table; never what a resumed sequence had before
    recomputed_tokens: int = 0  # positions computed again after a preemption
    prefill_tokens: int = 0  # positions that prefill calls computed
    prefill_padding: int = 0  # positions of prefill calls that were padding
    draft_prefill_tokens: int = 0  # positions that prefill calls of a draft with K/V of its own computed
    decode_rows: int = 0
    decode_padding: int = 0  # padding rows of decode calls
    decode_calls: int = 0
    verify_calls: int = 0  # those of them that verified drafts
    drafts: int = 0  # proposals: one for each row of a verify call that had drafts
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_runs: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFTS + 1))  # proposals by tokens accepted
    preemptions: int = 0
    nan_rows: int = 0
    stopped: int = 0  # sequences by how they ended
    length_limited: int = 0
    aborted: int = 0
    failed: int = 0

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Entry i: how often a proposal's token i was accepted.  Up to the last position where any was."""
        at_least = list(accumulate(reversed(self.accepted_runs)))[::-1]
        return tuple([count for count in at_least[1:] if count])

    def copy(self) -> Counters:
        return replace(self, accepted_runs=self.accepted_runs.copy())

    def count_proposal(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_runs[accepted] += 1

    def count_ending(self, reason: FinishReason) -> None:
        match reason:
            case FinishReason.STOP:
                self.stopped += 1
            case FinishReason.LENGTH:
                self.length_limited += 1
            case FinishReason.ABORT:
                self.aborted += 1
            case FinishReason.ERROR:
                self.failed += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLoad:
    """A snapshot.  Pages: free + cached + held = total."""

    running: int
    waiting: int
    slots: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    totals: Counters  # a copy
