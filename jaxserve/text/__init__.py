"""Text <-> token ids.  Never jax, never a socket; the libraries behind it are imported when a tokenizer is loaded.

User text is plain text: only `parse_special` and a chat template's own words make control tokens."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from checkpoints import ModelFiles

# file that tells the kind -> "module:function", which takes the model's path; imported when chosen
TOKENIZERS = {
    "*.gguf": "jaxserve.text.gguf:load",
    "tokenizer.json": "jaxserve.text.hf:load",
    "tokenizer.model": "jaxserve.text.sentencepiece:load",
}


class Tokenizer(Protocol):
    """What the engine and both fronts know of a vocabulary."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence; the first is the one that templates call eos_token."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: left out of text unless asked for."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Control tokens by the text that stands for them in templates."""
        ...

    @property
    def adds_bos(self) -> bool: ...

    @property
    def strips_leading_space(self) -> bool:
        """Decoding drops one space at the very start: the one that encoding put there."""
        ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def tool_template(self) -> str | None:
        """The template for chats with tools, of a model that has one of its own for them."""
        ...

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Ids of `text`.  `add_bos=None` does as the model's own tokenizer does; never a second BOS.  Words like
        <|im_end|> stay plain text unless `parse_special`.  Raises RequestError for text that is not Unicode."""
        ...

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of plain texts with control tokens (given as ids) between them; no BOS is added."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The whole text; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes this token adds to the text; none for an id without a token."""
        ...

    def save(self, folder: Path) -> None:
        """Writes files in Hugging Face layout from which `load_tokenizer` rebuilds this tokenizer."""
        ...


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The model's own tokenizer.  Raises ValueError naming the file at fault."""
    if files.kind == "gguf":
        return _load("*.gguf", files.path)
    for name in ("tokenizer.json", "tokenizer.model"):
        if (files.path / name).is_file():
            return _load(name, files.path)
    raise ValueError(f"{files.path} holds neither tokenizer.json nor tokenizer.model")


def _load(name: str, path: Path) -> Tokenizer:
    module, _, function = TOKENIZERS[name].partition(":")
    return getattr(importlib.import_module(module), function)(path)
