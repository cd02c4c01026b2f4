"""How the BPE vocabularies that GGUF files name cut a text into words before any merge: data, not code.

The names are llama.cpp's (`tokenizer.ggml.pre`), the rules those of the original tokenizers."""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    patterns: tuple[str, ...]  # each cuts what the one before it left; what none matches is a word as well
    ignore_merges: bool = False  # a word that is a token is that token
    adds_bos: bool = False  # when the file does not say
    nfc: bool = False  # the original composes accents first


_SMOLLM = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_QWEN = PreTokenizer(patterns=(_QWEN2,), nfc=True)
_LLAMA = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, adds_bos=True)
_PLAIN_GPT2 = PreTokenizer(patterns=(_GPT2,))

PRE_TOKENIZERS = {
    "default": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "jais": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "codeshell": _SMOLLM,
    "command-r": _SMOLLM,
    "exaone": _SMOLLM,
    "minerva-7b": _SMOLLM,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "falcon3": _LLAMA,
    "pixtral": _LLAMA,
    "lfm2": _LLAMA,
    "dbrx": PreTokenizer(patterns=(_LLAMA3,)),
    "smaug-bpe": PreTokenizer(patterns=(_LLAMA3,)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "stablelm2": PreTokenizer(patterns=(_QWEN2,)),
    "hunyuan": PreTokenizer(patterns=(_QWEN2,)),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(patterns=(_GPT4O,)),
    "falcon": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
