"""WaitingQueue: who is admitted next.

In a class of one priority, those that ran before stand first, then whoever came first.  Between classes the heads are
compared by priority and age together: `age_seconds` of waiting are worth one level, so no class starves."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import merge

from jaxserve.sched.sequence import SequenceState


class WaitingQueue:
    def __init__(self, age_seconds: float):
        self.age_seconds = age_seconds
        self._classes: dict[int, list[SequenceState]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[SequenceState]:
        """In the order of admission.  The queue must not change meanwhile."""
        return merge(*self._classes.values(), key=self._rank)

    def _rank(self, sequence: SequenceState) -> float:
        """Lower goes first.  Everybody ages alike, so the order of two never changes and needs no clock."""
        return sequence.arrival - sequence.request.priority * self.age_seconds

    def push(self, sequence: SequenceState) -> None:
        members = self._classes.setdefault(sequence.request.priority, [])
        insort(members, sequence, key=lambda member: (not member.is_resumed, member.arrival, member.number))
        self._count += 1

    def remove(self, sequence: SequenceState) -> None:
        members = self._classes[sequence.request.priority]
        members.remove(sequence)
        self._count -= 1
        if not members:
            del self._classes[sequence.request.priority]
