"""Finding stop strings in a text that arrives piece by piece.

Aho and Corasick's automaton ("Efficient string matching", 1975): constant work for each character however long or
many the stops are, and its state's depth is at any moment the length of the longest suffix that starts a stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _State:
    depth: int
    goto: dict[str, _State] = field(default_factory=dict)
    fail: _State | None = None  # the longest proper suffix that is a state; None for the root
    ends: tuple[str, ...] = ()  # stops that end here, longest first


class StopMatcher:
    """Scans a text once.  `depth` says how much of its end may be the beginning of a stop."""

    def __init__(self, stops: Sequence[str]):
        self._root = _State(0)
        for stop in dict.fromkeys(stops):
            assert stop, "an empty stop string would end every text"
            state = self._root
            for char in stop:
                state = state.goto.setdefault(char, _State(state.depth + 1))
            state.ends = (stop,)
        self._link()
        self._state = self._root

    def _link(self) -> None:
        waiting = deque([self._root])
        while waiting:
            state = waiting.popleft()
            for char, child in state.goto.items():
                child.fail = _step(state.fail, char) or self._root
                child.ends += child.fail.ends
                waiting.append(child)

    @property
    def depth(self) -> int:
        return self._state.depth

    def scan(self, text: str) -> tuple[int, str] | None:
        """Reads on.  Of the stops that end within `text`: where the one that begins first begins, relative to the start
        of `text` (negative when it began before), and which it is; of two that begin there, the longer."""
        state, root = self._state, self._root
        if state is root and root.goto.keys().isdisjoint(text):
            return None  # nearly every token: no stop begins in it
        found: tuple[int, str] | None = None
        for end, char in enumerate(text, 1):
            state = _step(state, char) or root
            for stop in state.ends:
                start = end - len(stop)
                if found is None or start < found[0] or (start == found[0] and len(stop) > len(found[1])):
                    found = (start, stop)
        self._state = state
        return found


def _step(state: _State | None, char: str) -> _State | None:
    while state is not None:
        if (following := state.goto.get(char)) is not None:
            return following
        state = state.fail
    return None
