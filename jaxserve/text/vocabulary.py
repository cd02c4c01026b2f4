"""A tokenizer's table of tokens, and all that follows from it alone: decoding, control tokens, the BOS rule.

How plain text becomes ids is the business of an `Encoder`; there is one for each library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from jaxserve.request import RequestError
from jaxserve.text.folder import TOOL_TEMPLATE


class Encoder(Protocol):
    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """Ids of plain text that is never parsed for control tokens; `at_start` = nothing stands before it."""
        ...

    def save(self, folder: Path) -> dict[str, object]:
        """Writes the library's own file (tokenizer.json or tokenizer.model); returns what tokenizer_config.json must
        say of it beside what a Vocabulary knows."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The Tokenizer of every model: a table, and an encoder for plain text."""

    encoder: Encoder
    table: Sequence[bytes]  # id -> the bytes it adds to the text
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, int]
    adds_bos: bool
    strips_leading_space: bool = False
    chat_template: str | None = None
    tool_template: str | None = None
    eats_left: frozenset[int] = frozenset()  # control tokens that take the white space before them away
    eats_right: frozenset[int] = frozenset()  # ... and after them
    special_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "special_ids", frozenset(self.special_tokens.values()))

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode(errors="replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        ids = self.encode_parts(self.split_special(text) if parse_special else (text,))
        if self.adds_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise RequestError("this model's vocabulary has no BOS token", field="add_bos")
            if ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
        return ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            if index and parts[index - 1] in self.eats_right:
                part = part.lstrip()
            if index + 1 < len(parts) and parts[index + 1] in self.eats_left:
                part = part.rstrip()
            if part:
                _check_unicode(part)
                ids += self.encoder.encode(part, at_start=index == 0)
        return ids

    def split_special(self, text: str) -> list[str | int]:
        """The text's control tokens as ids, and the plain texts between them.  The leftmost wins, then the longest."""
        if not self.special_tokens:
            return [text]
        pieces = self.special_pattern.split(text)  # plain, special, plain, special, ... plain
        return [self.special_tokens[piece] if i % 2 else piece for i, piece in enumerate(pieces) if piece]

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = self.encoder.save(folder) | {
            "add_bos_token": self.adds_bos,
            "bos_token": None if self.bos_id is None else self._text(self.bos_id),
            "eos_token": self._text(self.eos_ids[0]) if self.eos_ids else None,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        if self.chat_template is not None and self.tool_template is not None:
            named = {"default": self.chat_template, TOOL_TEMPLATE: self.tool_template}
            config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        _write(folder / "tokenizer_config.json", config)
        _write(folder / "generation_config.json", {"bos_token_id": self.bos_id, "eos_token_id": list(self.eos_ids)})

    def _text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _check_unicode(text: str) -> None:
    """JSON can spell half a surrogate pair; no tokenizer can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the text holds a lone surrogate ({text[error.start]!a} at character {error.start})"
        raise RequestError(message, field="text") from None
