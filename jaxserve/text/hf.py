"""tokenizer.json, by the `tokenizers` package: byte-level BPE, and BPE or unigram in SentencePiece's style.

Also builds the Vocabulary of a `tokenizers.Tokenizer` made elsewhere (a GGUF's)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from jaxserve.text.folder import FolderConfig
from jaxserve.text.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load(folder: Path) -> Vocabulary:
    """The tokenizer of a folder in Hugging Face layout.  Raises ValueError naming the file."""
    path = folder / "tokenizer.json"
    try:
        source = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path} is no tokenizer that the tokenizers package can read: {error}") from None
    return from_tokenizer(source, FolderConfig.read(folder), str(path))


def from_tokenizer(source: tokenizers.Tokenizer, config: FolderConfig, place: str) -> Vocabulary:
    source.no_truncation()  # a file may carry both, and neither may touch a prompt
    source.no_padding()
    spec = json.loads(source.to_str())
    special = {token["content"]: token["id"] for token in spec["added_tokens"] if token["special"]}
    ids_of = source.get_vocab(with_added_tokens=True)
    special |= {text: ids_of[text] for text in config.control_tokens if text in ids_of}
    bos_id = ids_of.get(config.bos_token) if config.bos_token else None
    first = source.encode("", add_special_tokens=True).ids
    if bos_id is None and first:
        bos_id = first[0]
    adds_bos = config.add_bos if config.add_bos is not None else bool(first) and first[0] == bos_id
    return Vocabulary(
        encoder=HFEncoder(source, spec),
        table=_table(ids_of, spec, place),
        bos_id=bos_id,
        eos_ids=config.eos_ids(ids_of),
        special_tokens=special,
        adds_bos=adds_bos and bos_id is not None,
        strips_leading_space=_strips_leading_space(spec["decoder"]),
        chat_template=config.chat_template,
        tool_template=config.tool_template,
        eats_left=frozenset(t["id"] for t in spec["added_tokens"] if t["special"] and t["lstrip"]),
        eats_right=frozenset(t["id"] for t in spec["added_tokens"] if t["special"] and t["rstrip"]),
    )


class HFEncoder:
    """Plain text to ids.  Metaspace's "first" looks at the position in the whole text, which the library does not know
    here: text behind a control token goes to a twin that never puts a space in front."""

    def __init__(self, source: tokenizers.Tokenizer, spec: dict):
        self._start = source
        self._inner = source
        if any(node.get("prepend_scheme") == "first" for node in _nodes(spec["pre_tokenizer"], "Metaspace")):
            for node in _nodes(spec["pre_tokenizer"], "Metaspace"):
                node["prepend_scheme"] = "never"
            self._inner = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self._start.encode_special_tokens = True  # means: as plain text
        self._inner.encode_special_tokens = True

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        return (self._start if at_start else self._inner).encode(text, add_special_tokens=False).ids

    def save(self, folder: Path) -> dict[str, object]:
        self._start.save(str(folder / "tokenizer.json"))
        return {}


def _nodes(node: dict | None, kind: str) -> list[dict]:
    """All parts of this type in a normalizer, pre-tokenizer or decoder, which may be sequences of sequences."""
    if not node:
        return []
    inner = [part for name in ("decoders", "pretokenizers", "normalizers") for part in node.get(name, ())]
    return [node] * (node["type"] == kind) + [found for part in inner for found in _nodes(part, kind)]


def _strips_leading_space(decoder: dict | None) -> bool:
    if any(node["content"] == " " and node["start"] > 0 for node in _nodes(decoder, "Strip")):
        return True
    return any(node.get("prepend_scheme") != "never" for node in _nodes(decoder, "Metaspace"))


def _table(ids_of: dict[str, int], spec: dict, place: str) -> Sequence[bytes]:
    decoder = spec["decoder"]
    if _nodes(decoder, "ByteLevel"):
        to_bytes = _byte_level
    elif _nodes(decoder, "ByteFallback") or _nodes(decoder, "Metaspace") or _nodes(decoder, "Replace"):
        to_bytes = _metaspace
    else:
        kind = decoder["type"] if decoder else None
        raise ValueError(
            f"{place} decodes by {kind}, which is not supported (ByteLevel, ByteFallback and Metaspace are)"
        )
    table = [b""] * (max(ids_of.values(), default=-1) + 1)
    for text, token_id in ids_of.items():
        table[token_id] = to_bytes(text)
    for token in spec["added_tokens"]:  # the library adds these to the text as they are
        table[token["id"]] = token["content"].encode()
    return table


def byte_alphabet() -> dict[int, str]:
    """GPT-2's table: byte -> the printable character that stands for it in a vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_TO_LATIN1 = {ord(char): chr(byte) for byte, char in byte_alphabet().items()}


def _byte_level(text: str) -> bytes:
    try:
        return text.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:  # not of the alphabet: a token that was added as it is
        return text.encode()


def _metaspace(text: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace("▁", " ").encode()
