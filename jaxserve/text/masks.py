"""Which token may come next: a grammar's matcher, bad words, and what a request allows and bans, in one mask of bits.

The masks of a step's rows are worked out together (`MaskFiller`), in threads of llguidance's own and off the GIL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
from llguidance import LLExecutor, LLMatcher

from jaxserve.request import MaskError, TokenMask
from jaxserve.text.trial import error_of

Words = np.ndarray  # [..., ceil(V/32)] uint32: bit i of word w allows id 32 * w + i
Ask = tuple[TokenMask, Sequence[int]]  # a mask, and the drafts that may follow its newest token


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What all sequences of one request share."""

    allowed: Words  # [W] ids that may come at all
    held: Sequence[tuple[Words, int | None]] = ()  # [W] ids that may not come before so many tokens; None = never
    bad_words: Mapping[tuple[int, ...], Sequence[int]] = field(default_factory=dict)  # newest ids -> ids then banned
    grammar: LLMatcher | None = None  # at its start; copied, never advanced

    def start(self) -> RowMask:
        return RowMask(self)

    @cached_property
    def prefix_lengths(self) -> Sequence[int]:
        return tuple({len(prefix) for prefix in self.bad_words})


class RowMask:
    """The mask of one sequence: a TokenMask."""

    def __init__(self, rules: Rules):
        self._rules = rules
        self._output: list[int] = []
        self.matcher = rules.grammar.deep_copy() if rules.grammar else None

    def advance(self, token_ids: Sequence[int]) -> None:
        self._output += token_ids
        if self.matcher is not None and not self.matcher.consume_tokens(list(token_ids)):
            raise MaskError(f"the grammar's parser gave up: {error_of(self.matcher)}")

    def rollback(self, count: int) -> None:
        if count:
            del self._output[-count:]
            if self.matcher is not None:
                self.matcher.rollback(count)

    def words(self) -> bytes:
        (words,) = MaskFiller(self._rules.allowed.size).fill([(self, ())])
        if isinstance(words, MaskError):
            raise words
        return words.tobytes()

    def restart(self) -> None:
        """A parser that ran out of its limits stays broken, and a draft that is never drawn may have done that."""
        assert self._rules.grammar is not None
        self.matcher = self._rules.grammar.deep_copy()
        self.matcher.consume_tokens(self._output)

    def restrict(self, words: Words, drafts: Sequence[int]) -> None:
        """words [1 + drafts, W], at each position given the drafts before it: what the grammar allows (zeros from
        the first position that it cannot reach) -> what every rule allows (zeros likewise).

        Raises MaskError when nothing is left at the first position."""
        for position, row in enumerate(words):
            self._restrict_row(row, [*self._output, *drafts[:position]] if position else self._output)
            if not position and not row.any():
                raise MaskError("no token is left that all rules of this request allow together")
            if position < len(drafts) and not holds(row, drafts[position]):
                words[position + 1 :] = 0
                return

    def _restrict_row(self, row: Words, output: Sequence[int]) -> None:
        rules = self._rules
        row &= rules.allowed
        for length in rules.prefix_lengths:
            if len(output) >= length:
                for token_id in rules.bad_words.get(tuple(output[len(output) - length :]), ()):
                    row[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        for held, until in rules.held:
            if until is None or len(output) < until:
                others = row & ~held
                if others.any() or rules.grammar is None:  # a grammar that leaves only its end is not held back
                    row[:] = others


class MaskFiller:
    """Fills the masks of a step.  Owns the threads that do it."""

    def __init__(self, width: int):
        self._width = width  # W, words of a mask
        self._executor: LLExecutor | None = None  # made when the first grammar comes

    def fill(self, asks: Sequence[Ask]) -> list[Words | MaskError]:
        """-> of each ask [1 + drafts, W]: the mask at every position, zeros from the first that cannot be reached."""
        stops = list(accumulate(1 + len(drafts) for _, drafts in asks))
        words = np.zeros((stops[-1] if stops else 0, self._width), np.uint32)
        parts = [words[stop - 1 - len(drafts) : stop] for (_, drafts), stop in zip(asks, stops, strict=True)]
        self._run_parsers(asks, stops, words)
        return [_finish(mask, drafts, part) for (mask, drafts), part in zip(asks, parts, strict=True)]

    def _run_parsers(self, asks: Sequence[Ask], stops: Sequence[int], words: Words) -> None:
        alone: list[tuple[LLMatcher, int]] = []
        ahead: list[tuple[LLMatcher, int, list[int]]] = []
        for (mask, drafts), stop in zip(asks, stops, strict=True):
            if not isinstance(mask, RowMask) or mask.matcher is None:
                continue
            if drafts:
                ahead.append((mask.matcher, stop - 1 - len(drafts), list(drafts)))
            else:
                alone.append((mask.matcher, stop - 1))
        if not alone and not ahead:
            return
        if self._executor is None:
            self._executor = LLExecutor()
        where = words.ctypes.data, words.itemsize * self._width, len(words)
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *where)
        if ahead:  # stops at the first draft that a grammar refuses, and takes all of them back
            self._executor.unsafe_compute_mask_ptr_with_draft_token(ahead, *where)


def _finish(mask: TokenMask, drafts: Sequence[int], words: Words) -> Words | MaskError:
    """words [1 + drafts, W]: written by the grammar's parser where the mask has one."""
    try:
        if not isinstance(mask, RowMask):
            _walk(mask, drafts, words)
            return words
        if mask.matcher is None:
            words[:] = 0xFFFFFFFF
        elif mask.matcher.is_error():
            mask.restart()
            words[1:] = 0  # no drafts this time
            words[0] = np.frombuffer(mask.matcher.compute_bitmask(), np.uint32)
            if mask.matcher.is_error():
                raise MaskError(f"the grammar's parser gave up: {error_of(mask.matcher)}")
        mask.restrict(words, drafts)
        return words
    except MaskError as error:
        return error


def _walk(mask: TokenMask, drafts: Sequence[int], words: Words) -> None:
    """Any mask, by its protocol alone."""
    taken = 0
    try:
        for position in range(len(words)):
            words[position] = np.frombuffer(mask.words(), "<u4")
            if position == len(drafts) or not holds(words[position], drafts[position]):
                return
            mask.advance([drafts[position]])
            taken += 1
    except MaskError:
        if not taken:
            raise
    finally:
        if taken:
            mask.rollback(taken)


def holds(words: Words, token_id: int) -> bool:
    """words [W]."""
    return bool(words[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def words_of(ids: Iterable[int], vocab: int) -> Words:
    """-> [W] with the bits of these ids."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
