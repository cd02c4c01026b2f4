"""Tool calls in a text that arrives piece by piece.

A call is an opening marker with {"name": ..., "arguments": {...}} behind it, in this order; the whole text alone decides
where one stands, never how the text was cut.  All else is content: a marker without a call behind it, broken JSON, a
call that ends before its arguments begin.  A call is told as soon as its arguments begin and cannot be taken back, so
arguments that break off or break later end there, and what follows is content.  White space next to calls is dropped,
but for what stands between two contents."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.text.json_object import WHITE, JsonObject
from jaxserve.text.tool_forms import ToolForm

MAX_NAME = 256  # characters


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


@dataclass(slots=True)
class CallDelta:
    """What was added to one call; `id` and `name` come once, first."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ToolDelta:
    """What a piece of text added: to the content, and to each call at most once."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class _Expected:
    """A pattern that says of a text's beginning: it is there, it may yet come, or neither."""

    def __init__(self, *parts: str):
        """parts: regular expressions of one character, or of one repeated, in order."""
        starts = ""
        for part in reversed(parts):
            starts = f"(?:{part}{starts})?"
        self._whole = re.compile("".join(parts))
        self._start = re.compile(starts)

    def match(self, text: str) -> re.Match[str] | None:
        return self._whole.match(text)

    def may_come(self, text: str) -> bool:
        return self._start.fullmatch(text) is not None


_WHITE = rf"[{WHITE}]*+"  # possessive: two in a row must not try every way to share


def _letters(text: str) -> list[str]:
    return [re.escape(char) for char in text]


def _key(name: str) -> list[str]:
    return [_WHITE, *_letters(f'"{name}"'), _WHITE, ":", _WHITE]


class ToolCallParser:
    """One answer's text.  After `finish` nothing may follow."""

    def __init__(self, form: ToolForm, *, new_id: Callable[[], str] = new_call_id):
        self.num_calls = 0
        self._form = form
        self._new_id = new_id
        name = ['"', rf'(?P<name>[^"\\\x00-\x1f]{{1,{MAX_NAME}}})', '"']
        arguments = [",", *_key(form.arguments_key), r"(?=\{)"]  # the brace is the arguments' own
        self._head = _Expected(_WHITE, r"\{", *_key("name"), *name, _WHITE, *arguments)
        self._end = _Expected(_WHITE, r"\}")
        self._closing = _Expected(_WHITE, *_letters(form.closing))
        self._bare = _Expected(_WHITE, r"(?=\{)"), _Expected(_WHITE, ";?", _WHITE, r"(?=\{)")

        self._text = ""  # held back: it may belong to a call
        self._read: Callable[[bool], bool] = self._read_content
        self._opening = 0  # how much of the text held back stands before a call's object, if it is one
        self._may_be_bare = form.is_bare
        self._arguments = JsonObject()
        self._has_broken = False  # arguments of a call broke
        self._has_content = False
        self._is_behind_call = False  # no content has come since a call
        self._delta = ToolDelta()

    @property
    def is_whole(self) -> bool:
        """There are calls, and the arguments of all have come to their end."""
        return self.num_calls > 0 and self._arguments.is_whole and not self._has_broken

    def feed(self, text: str) -> ToolDelta:
        self._text += text
        return self._run(False)

    def finish(self) -> ToolDelta:
        """The answer has ended: what is still held back."""
        return self._run(True)

    def _run(self, is_end: bool) -> ToolDelta:
        self._delta = ToolDelta()
        while self._read(is_end):
            pass
        return self._delta

    # -- each reads on from the beginning of `_text`; False: no further without more text ------------------------------

    def _read_content(self, is_end: bool) -> bool:
        if self._may_be_bare:
            bare = self._bare[self.num_calls > 0]
            if found := bare.match(self._text):
                return self._try_call(0, found.end())
            if bare.may_come(self._text) and not is_end:
                return False
            self._may_be_bare = False
        at = self._text.find(self._form.opening)
        if at >= 0:
            return self._try_call(at, at + len(self._form.opening))
        sure = len(self._text) if is_end else len(self._text) - self._begun_opening()
        if not is_end or self._is_behind_call:
            sure = len(self._text[:sure].rstrip(WHITE))
        self._say(self._text[:sure])
        self._text = "" if is_end else self._text[sure:]
        return False

    def _begun_opening(self) -> int:
        """Characters at the text's end that begin the opening marker."""
        opening = self._form.opening
        longest = min(len(opening) - 1, len(self._text))
        return next((size for size in range(longest, 0, -1) if self._text.endswith(opening[:size])), 0)

    def _try_call(self, start: int, end: int) -> bool:
        """An opening stands from `start` to `end`; white space before it is part of it."""
        content = self._text[:start].rstrip(WHITE)
        self._say(content)
        self._text = self._text[len(content) :]
        self._opening = end - len(content)
        self._read = self._read_head
        return True

    def _read_head(self, is_end: bool) -> bool:
        rest = self._text[self._opening :]
        if found := self._head.match(rest):
            self._begin_call(found["name"])
            self._text = rest[found.end() :]
            return True
        if self._head.may_come(rest) and not is_end:
            return False
        self._may_be_bare = False
        self._say(self._text[: self._opening])
        self._text = rest
        self._read = self._read_content
        return True

    def _begin_call(self, name: str) -> None:
        self._delta.calls.append(CallDelta(self.num_calls, self._new_id(), name))
        self.num_calls += 1
        self._is_behind_call, self._may_be_bare = True, False
        self._arguments = JsonObject()
        self._read = self._read_arguments

    def _read_arguments(self, is_end: bool) -> bool:
        size = self._arguments.take(self._text)
        if size:
            calls, index = self._delta.calls, self.num_calls - 1
            if not calls or calls[-1].index != index:
                calls.append(CallDelta(index))
            calls[-1].arguments += self._text[:size]
            self._text = self._text[size:]
        if self._arguments.is_whole:
            self._read = self._read_end
        elif self._arguments.is_broken:
            self._has_broken = True
            self._read = self._read_content
        return self._arguments.is_whole or self._arguments.is_broken

    def _read_end(self, is_end: bool) -> bool:
        return self._skip(self._end, is_end, self._read_closing)

    def _read_closing(self, is_end: bool) -> bool:
        self._may_be_bare = self._form.is_bare
        if not self._form.closing:
            self._read = self._read_content
            return True
        return self._skip(self._closing, is_end, self._read_content)

    def _skip(self, expected: _Expected, is_end: bool, then: Callable[[bool], bool]) -> bool:
        """What belongs to a call that is told already; models leave it out now and then."""
        if found := expected.match(self._text):
            self._text = self._text[found.end() :]
        elif expected.may_come(self._text) and not is_end:
            return False
        self._read = then
        return True

    def _say(self, content: str) -> None:
        if not self._has_content and self.num_calls:
            content = content.lstrip(WHITE)
        if content:
            self._has_content, self._is_behind_call = True, False
            self._delta.content += content
