"""tokenizer.model, by the `sentencepiece` package.

That package never reads control tokens from plain text; tokens that a folder adds beside the model are found here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from jaxserve.text.folder import FolderConfig
from jaxserve.text.vocabulary import Vocabulary

_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6  # ModelProto.SentencePiece.Type


def load(folder: Path) -> Vocabulary:
    """The tokenizer of a folder in Hugging Face layout.  Raises ValueError naming the file."""
    path = folder / "tokenizer.model"
    return from_model(path.read_bytes(), FolderConfig.read(folder), str(path))


def from_model(model: bytes, config: FolderConfig, place: str) -> Vocabulary:
    """`model` is a serialised ModelProto."""
    try:
        proto = ModelProto.FromString(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except Exception as error:  # protobuf's and the library's own kinds
        raise ValueError(f"{place} is no model that the sentencepiece package can read: {error}") from None
    pieces = [(piece.piece, piece.type) for piece in proto.pieces]
    table = [_bytes(text, kind) for text, kind in pieces]
    special = {text: i for i, (text, kind) in enumerate(pieces) if kind in (_CONTROL, _UNKNOWN)}
    added = {i: token for i, token in config.added_tokens.items() if i >= len(pieces)}
    table += [b""] * (max(added, default=-1) + 1 - len(table))
    for token_id, (text, is_control) in added.items():
        table[token_id] = text.encode()
        special |= {text: token_id} if is_control else {}
    # A folder's bos_token may be one of the model's ordinary pieces.
    special |= {text: i for i, (text, _) in enumerate(pieces) if text in config.control_tokens}
    bos_id = special.get(config.bos_token or proto.trainer_spec.bos_piece)
    return Vocabulary(
        encoder=SentencePieceEncoder(processor, proto, legacy=config.legacy, added=added),
        table=table,
        bos_id=bos_id,
        eos_ids=config.eos_ids(special)
        or tuple(i for i in [special.get(proto.trainer_spec.eos_piece)] if i is not None),
        special_tokens=special,
        adds_bos=bos_id is not None and config.add_bos is not False,
        strips_leading_space=proto.normalizer_spec.add_dummy_prefix,
        chat_template=config.chat_template,
        tool_template=config.tool_template,
    )


def _bytes(text: str, kind: int) -> bytes:
    if kind == _BYTE:  # <0x0A>
        return bytes([int(text[1:-1], 16)])
    return text.encode() if kind in (_CONTROL, _UNKNOWN) else text.replace("▁", " ").encode()


class SentencePieceEncoder:
    """Plain text to ids.  With `legacy`, as Llama's first tokenizers do, every text gets the model's leading space,
    also one behind a control token; without it, only text at the very start."""

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        proto: ModelProto,
        *,
        legacy: bool,
        added: Mapping[int, tuple[str, bool]],  # id -> (text, is it a control token), beside the model
    ):
        self._start = processor
        self._inner = processor
        if proto.normalizer_spec.add_dummy_prefix and not legacy:
            bare = ModelProto()
            bare.CopyFrom(proto)
            bare.normalizer_spec.add_dummy_prefix = False
            self._inner = sentencepiece.SentencePieceProcessor(model_proto=bare.SerializeToString())
        self._legacy = legacy
        self._added = added
        self._plain = {text: i for i, (text, control) in added.items() if not control}
        longest_first = sorted(self._plain, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        if self._pattern is None:
            return (self._start if at_start else self._inner).encode(text)
        ids: list[int] = []
        for index, piece in enumerate(self._pattern.split(text)):
            if index % 2:
                ids.append(self._plain[piece])
            elif piece:
                ids += (self._start if at_start and index == 0 else self._inner).encode(piece)
        return ids

    def save(self, folder: Path) -> dict[str, object]:
        (folder / "tokenizer.model").write_bytes(self._start.serialized_model_proto())
        added = {str(i): {"content": text, "special": control} for i, (text, control) in self._added.items()}
        return {"legacy": self._legacy, "added_tokens_decoder": added}
