"""Token ids -> text as they come: whole characters only, and nothing of a stop string.

The texts of all calls joined are `tokenizer.decode` of all ids, up to the stop.  Work for a token does not grow with
the tokens before it.  Never looks at ids for an end: stop ids and end-of-sequence ids are the scheduler's."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.text import Tokenizer
from jaxserve.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class StopCut:
    """A stop string was completed."""

    keep: int  # of this call's tokens, how many count: up to and including the one that completed it
    stop: str


@dataclass(slots=True)  # not frozen: one a token is made
class Piece:
    """What a call added to the text; empty while bytes or a possible stop are held back."""

    text: str
    cut: StopCut | None = None


class Detokenizer:
    """One sequence's text.

    Stops are looked for after every token, so how tokens are grouped into calls changes nothing.  Of the stops that a
    token completes, the one that begins first wins; of two that begin together, the longer.  The text ends before it,
    or behind it with `include_stop`.  Only the longest suffix that may yet become a stop is held back.
    The text of the first `min_tokens` tokens is not searched.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ):
        """shown_ids: special tokens that are not skipped."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - shown_ids if skip_special else frozenset()
        # Holds an unfinished character back and replaces what can never become one, just as bytes.decode does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strips_leading_space
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._unsearched = min_tokens if stop else 0  # tokens whose text no stop may touch
        self._held = ""  # the end of the text, not yet sent: it starts a stop
        self._is_cut = False

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """The text that these tokens add.  After a cut nothing may follow."""
        assert not self._is_cut, "a text that was cut at a stop goes on"
        if len(token_ids) == 1:
            return self._feed_one(token_ids[0])
        texts: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            piece = self._feed_one(token_id)
            texts.append(piece.text)
            if piece.cut is not None:
                return Piece("".join(texts), StopCut(count, piece.cut.stop))
        return Piece("".join(texts))

    def _feed_one(self, token_id: int) -> Piece:
        new = self._text_of(token_id)
        self._unsearched -= 1
        if not new or self._matcher is None or self._unsearched >= 0:
            return Piece(new)
        found = self._matcher.scan(new)
        known = self._held + new
        if found is not None:
            start, stop = found
            end = len(self._held) + start
            self._held, self._is_cut = "", True
            return Piece(known[: end + len(stop) if self._include_stop else end], StopCut(1, stop))
        sure = len(known) - self._matcher.depth
        self._held = known[sure:]
        return Piece(known[:sure])

    def flush(self) -> str:
        """The held-back tail, when the sequence ends without a stop string; an unfinished character becomes U+FFFD."""
        tail = "" if self._is_cut else self._held + self._decoder.decode(b"", True)
        self._held = ""
        return tail

    def _decoded(self, data: bytes) -> str:
        if not self._decoder.buffer:
            try:
                return data.decode()  # whole characters, as nearly always: without the decoder, several times as fast
            except UnicodeDecodeError:
                pass
        return self._decoder.decode(data)

    def _text_of(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self._decoded(self._token_bytes(token_id))
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
