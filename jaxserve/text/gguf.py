"""The tokenizer inside a GGUF file, rebuilt for the library that its original ran on.

Byte-level BPE becomes a `tokenizers` tokenizer, SentencePiece's BPE a model for the `sentencepiece` package.  Which ids
a text gets is held to llama.cpp's answers for the same files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from checkpoints.gguf_file import GGUFFile
from jaxserve.text.folder import TOOL_TEMPLATE, FolderConfig
from jaxserve.text.pretokenizers import PRE_TOKENIZERS
from jaxserve.text.vocabulary import Vocabulary


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Ends of a turn or a text.  Files name one or two by id; llama.cpp finds the others by their text, and so must we.
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "[EOS]", "</s>", "<eos>"}
    | {"<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<EOT>", "_<EOT>", "[EOT]"}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The keys tokenizer.ggml.*, checked."""

    place: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    pre: str
    bos_id: int | None
    unknown_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool | None
    add_space_prefix: bool
    chat_template: str | None
    tool_template: str | None

    def of_type(self, *types: TokenType) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind in types]

    def config(self, *, adds_bos: bool) -> FolderConfig:
        """What a folder would say of this tokenizer; `adds_bos` is for a file that does not."""
        return FolderConfig(
            bos_token=None if self.bos_id is None else self.tokens[self.bos_id],
            more_eos_ids=self.eos_ids,
            add_bos=adds_bos if self.adds_bos is None else self.adds_bos,
            chat_template=self.chat_template,
            tool_template=self.tool_template,
        )


def load(path: Path) -> Vocabulary:
    """The tokenizer of a .gguf file.  Raises ValueError naming the file and the key at fault."""
    gguf = GGUFFile(path)
    model = gguf.metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        known = "gpt2 = byte-level BPE, llama = SentencePiece BPE"
        raise ValueError(f"{path}: tokenizer.ggml.model={model!r} is not supported (known: {known})")
    return builders[str(model)](_read(gguf))


def _read(gguf: GGUFFile) -> Fields:
    place, meta = str(gguf.path), gguf.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{place}: metadata 'tokenizer.ggml.tokens' must be a list of texts")
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{place}: metadata 'tokenizer.ggml.tokens' holds a token twice")
    types = _numbers(gguf, "token_type", len(tokens), TokenType.NORMAL)
    if wrong := set(types) - set(TokenType):
        raise ValueError(
            f"{place}: metadata 'tokenizer.ggml.token_type' holds {wrong.pop()}, which is no type of token"
        )
    named = [_token_id(gguf, f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")]
    bos_id = _token_id(gguf, "bos_token_id", len(tokens))
    for token_id in (bos_id, *named):
        if token_id is not None:
            types[token_id] = TokenType.CONTROL
    ends = [i for i, text in enumerate(tokens) if text in _END_TEXTS]
    for token_id in ends:
        # llama.cpp takes it for a control token, so it is never read from plain text.  Gemma's </s> is HTML, though:
        # it ends nothing and belongs to the text.
        if types[token_id] == TokenType.USER_DEFINED:
            types[token_id] = TokenType.NORMAL
    eos = [i for i in named if i is not None] + [i for i in ends if types[i] == TokenType.CONTROL]
    merges = meta.get("tokenizer.ggml.merges", [])
    adds_bos = meta.get("tokenizer.ggml.add_bos_token")
    templates = [meta.get(f"tokenizer.chat_template{name}") for name in ("", f".{TOOL_TEMPLATE}")]
    template, tool_template = (text if isinstance(text, str) else None for text in templates)
    return Fields(
        place=place,
        tokens=tokens,
        types=[int(kind) for kind in types],
        scores=_numbers(gguf, "scores", len(tokens), 0.0),
        merges=merges if isinstance(merges, list) else [],
        pre=str(meta.get("tokenizer.ggml.pre", "default")),
        bos_id=bos_id,
        unknown_id=_token_id(gguf, "unknown_token_id", len(tokens)),
        eos_ids=tuple(dict.fromkeys(eos)),
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        add_space_prefix=meta.get("tokenizer.ggml.add_space_prefix", True) is True,
        chat_template=template,
        tool_template=tool_template,
    )


def _numbers(gguf: GGUFFile, key: str, count: int, default: float) -> list:
    values = gguf.metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return [default] * count
    if not isinstance(values, np.ndarray) or values.size < count:
        raise ValueError(f"{gguf.path}: metadata 'tokenizer.ggml.{key}' must hold {count} numbers, one for each token")
    return values[:count].tolist()


def _token_id(gguf: GGUFFile, key: str, count: int) -> int | None:
    token_id = gguf.metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None or token_id == 2**32 - 1:  # -1 = none
        return None
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < count:
        raise ValueError(f"{gguf.path}: metadata 'tokenizer.ggml.{key}'={token_id!r} is no id below {count}")
    return token_id


def _byte_level(fields: Fields) -> Vocabulary:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    from jaxserve.text.hf import from_tokenizer

    if fields.pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ValueError(f"{fields.place}: the pre-tokenizer {fields.pre!r} is not known (known: {known})")
    pre = PRE_TOKENIZERS[fields.pre]
    vocab = {text: i for i, text in enumerate(fields.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in fields.merges)]
    if wrong := next((pair for pair in merges if not all(pair) or " " in pair[1]), None):
        raise ValueError(
            f"{fields.place}: metadata 'tokenizer.ggml.merges' holds {' '.join(wrong)!r}, which is no pair"
        )
    try:
        source = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{fields.place}: metadata 'tokenizer.ggml.merges' does not fit the tokens: {error}") from None
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    source.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    source.decoder = decoders.ByteLevel()
    if pre.nfc:
        source.normalizer = normalizers.NFC()

    def added(ids: Sequence[int], *, special: bool) -> list[AddedToken]:
        return [AddedToken(fields.tokens[i], special=special, normalized=False) for i in ids]

    source.add_special_tokens(added(fields.of_type(TokenType.CONTROL, TokenType.UNKNOWN), special=True))
    source.add_tokens(added(fields.of_type(TokenType.USER_DEFINED), special=False))
    return from_tokenizer(source, fields.config(adds_bos=pre.adds_bos), fields.place)


def _sentencepiece(fields: Fields) -> Vocabulary:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

    from jaxserve.text.sentencepiece import from_model

    unknowns = fields.of_type(TokenType.UNKNOWN) if fields.unknown_id is None else [fields.unknown_id]
    if not unknowns:
        raise ValueError(f"{fields.place}: the vocabulary names no unknown token (tokenizer.ggml.unknown_token_id)")
    types = [TokenType.CONTROL if kind == TokenType.UNKNOWN else kind for kind in fields.types]
    types[unknowns[0]] = TokenType.UNKNOWN  # the library wants exactly one
    proto = ModelProto()
    for text, score, kind in zip(fields.tokens, fields.scores, types, strict=True):
        # llama.cpp keeps user-defined tokens with plain spaces, ready to be found in plain text.
        piece = text.replace(" ", "▁") if kind == TokenType.USER_DEFINED else text
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = TokenType.BYTE in types
    proto.trainer_spec.vocab_size = len(types)
    proto.trainer_spec.unk_id = unknowns[0]
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = fields.add_space_prefix
    proto.normalizer_spec.remove_extra_whitespaces = False
    return from_model(proto.SerializeToString(), fields.config(adds_bos=True), fields.place)
