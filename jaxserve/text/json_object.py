"""Where a JSON object ends, in a text that arrives piece by piece.

A strict reader of RFC 8259 that keeps a place and a stack, never the text: what it has taken is at any moment the
beginning of some object, so it can be passed on before the end is known."""

from __future__ import annotations

import re

WHITE = " \t\n\r"

_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR_START = re.compile(
    r"t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
    r"|-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?"
)
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # a string's characters that mean themselves


class JsonObject:
    """Takes an object from its `{` to its `}`.  Whether a text is broken does not depend on how it was cut."""

    def __init__(self) -> None:
        self.is_whole = False  # the closing brace was taken
        self.is_broken = False  # the next character cannot stand there, and was not taken
        self._open: list[str] = []  # { and [ that wait for their end
        self._place = "start"  # what may come next
        self._scalar = ""  # a number or a word, as far as it has come
        self._hex = 0  # digits of a \u that are still to come

    def take(self, text: str) -> int:
        """Reads on; -> how many characters belong to the object."""
        at = 0
        while at < len(text) and not self.is_whole and not self.is_broken:
            if self._place in ("key", "string") and (plain := _PLAIN.match(text, at)):
                at = plain.end()
                continue
            self.is_broken = not self._step(text[at])
            at += not self.is_broken
        return at

    def _step(self, char: str) -> bool:
        """One character; False when it cannot stand here."""
        match self._place:
            case "key" | "string":
                return self._in_string(char)
            case "key escape" | "string escape":
                return self._in_escape(char)
            case "scalar":
                return self._in_scalar(char)
        if char in WHITE:
            return self._place != "start"
        match self._place:
            case "start":
                return char == "{" and self._enter(char)
            case "first key" | "next key":
                if char == '"':
                    self._place = "key"
                    return True
                return self._place == "first key" and char == "}" and self._leave()
            case "colon":
                self._place = "value"
                return char == ":"
            case "first item" if char == "]":
                return self._leave()
            case "after value":
                if char == ",":
                    self._place = "next key" if self._open[-1] == "{" else "value"
                    return True
                return char == ("}" if self._open[-1] == "{" else "]") and self._leave()
        return self._begin_value(char)

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            return self._enter(char)
        if char == '"':
            self._place = "string"
            return True
        self._place, self._scalar = "scalar", char
        return _SCALAR_START.fullmatch(char) is not None

    def _enter(self, bracket: str) -> bool:
        self._open.append(bracket)
        self._place = "first key" if bracket == "{" else "first item"
        return True

    def _leave(self) -> bool:
        self._open.pop()
        self._place = "after value"
        self.is_whole = not self._open
        return True

    def _in_string(self, char: str) -> bool:
        if char == '"':
            self._place = "colon" if self._place == "key" else "after value"
        elif char == "\\":
            self._place += " escape"
        return char in '"\\'

    def _in_escape(self, char: str) -> bool:
        if self._hex:
            self._hex -= 1
            right = char in "0123456789abcdefABCDEF"
        else:
            self._hex = 4 * (char == "u")
            right = char in '"\\/bfnrtu'
        if not self._hex:
            self._place = self._place.removesuffix(" escape")
        return right

    def _in_scalar(self, char: str) -> bool:
        if _SCALAR_START.fullmatch(self._scalar + char):
            self._scalar += char
            return True
        if not _SCALAR.fullmatch(self._scalar):
            return False
        self._place = "after value"
        return self._step(char)
