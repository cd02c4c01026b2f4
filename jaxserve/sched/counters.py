"""What the scheduler counts, and the view of its load that others may read."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.request import FinishReason


@dataclass(slots=True)
class Counters:
    """Totals since the start; none ever falls."""

    steps: int = 0
    prompt_tokens: int = 0  # of accepted requests, once per sample
    output_tokens: int = 0
    prefix_hit_tokens: int = 0  # prompt tokens taken from the table; never what a resumed sequence had before
    recomputed_tokens: int = 0  # positions computed again after a preemption
    prefill_tokens: int = 0  # positions that prefill calls computed
    prefill_padding: int = 0  # positions of prefill calls that were padding
    draft_prefill_tokens: int = 0  # positions that prefill calls of a draft with K/V of its own computed
    decode_rows: int = 0
    decode_padding: int = 0  # padding rows of decode calls
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    nan_rows: int = 0
    stopped: int = 0  # sequences by how they ended
    length_limited: int = 0
    aborted: int = 0
    failed: int = 0

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
