"""Requests' grammars and bad words -> masks.  Compiling takes milliseconds to seconds: on a caller's thread, never in
the loop.

A structured answer ends with its grammar: when nothing may follow, only end-of-sequence ids are left to draw."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxserve.constraints import StructuredOutputs
from jaxserve.request import RequestError, SamplingParams, TokenMask
from jaxserve.text import Tokenizer
from jaxserve.text.masks import Rules, Words, words_of
from jaxserve.text.trial import Trial, error_of, parser_limits

CACHED_GRAMMARS = 64
# Between two JSON tokens: a line break with its indentation, or two blanks.  Models that like blanks must come to an end.
JSON_BLANKS = r"(\r?\n[\x20\x09]{0,32}|[\x20\x09]{1,2})"


class Grammars:
    """Compiles for one tokenizer and one model, whose vocabulary may be padded past it (those ids are never allowed by
    a grammar).  Any thread may call; `close` ends the trial process, which a later call starts again."""

    def __init__(self, tokenizer: Tokenizer, *, vocab: int):
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._trial = Trial(vocab=vocab)
        self._compiled: Callable[[StructuredOutputs], LLMatcher] = lru_cache(CACHED_GRAMMARS)(self._compile)

    def mask_factory(self, params: SamplingParams) -> Callable[[], TokenMask] | None:
        """What makes the masks of a request's sequences; None when it needs none.

        RequestError names the field and the parser's reason."""
        spec = params.structured_outputs
        if spec is None and not params.bad_words:
            return None
        eos = words_of(self._tokenizer.eos_ids, self._vocab)
        allowed = self._allowed(params)
        if spec is not None and not (allowed & eos).any():
            field = "allowed_token_ids" if params.allowed_token_ids is not None else "banned_token_ids"
            raise RequestError(f"{field} leaves no end-of-sequence id: a structured answer could not end", field=field)
        stops = set(params.stop_token_ids) | set(self._tokenizer.eos_ids if params.ends_at_eos else ())
        held: list[tuple[Words, int | None]] = []
        if params.min_tokens and stops:
            held.append((words_of(stops, self._vocab), params.min_tokens))
        if spec is not None and params.ignore_eos:
            held.append((eos, None))
        return Rules(
            allowed=allowed,
            held=held,
            bad_words=self._bad_words(params.bad_words),
            grammar=None if spec is None else self._compiled(spec),
        ).start

    def close(self) -> None:
        self._trial.close()

    def _allowed(self, params: SamplingParams) -> Words:
        allowed = params.allowed_token_ids
        words = self._every_id if allowed is None else words_of(allowed, self._vocab)
        return words & ~words_of(params.banned_token_ids, self._vocab)

    @cached_property
    def _every_id(self) -> Words:
        return words_of(range(self._vocab), self._vocab)

    def _bad_words(self, words: Sequence[str]) -> dict[tuple[int, ...], list[int]]:
        """As a text begins with them and as they stand within one, with and without a blank before."""
        banned: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            bare = word.lstrip()
            ways = {
                tuple(self._tokenizer.encode_parts([*before, text]))
                for text in (bare, " " + bare)
                for before in ((), ("",))
            }
            for *prefix, last in filter(None, ways):
                banned.setdefault(tuple(prefix), []).append(last)
        return banned

    def _compile(self, spec: StructuredOutputs) -> LLMatcher:
        if not self._tokenizer.eos_ids:
            raise RequestError(
                f"{spec.name}: this model has no end-of-sequence id, so no answer could end", field=spec.name
            )
        try:
            grammar = _grammar(spec)
        except ValueError as error:  # the schema's own options
            raise RequestError(f"{spec.name}: {error}", field=spec.name) from None
        refusal = self._trial.refusal(grammar)
        if refusal is not None:
            raise RequestError(f"{spec.name} cannot be used: {refusal}", field=spec.name)
        matcher = LLMatcher(self._parser_tokenizer, grammar, log_level=0, limits=parser_limits())
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise RequestError(f"{spec.name} cannot be used with this tokenizer: {error_of(first)}", field=spec.name)
        return matcher

    @cached_property
    def _parser_tokenizer(self) -> LLTokenizer:
        """A quarter of a second for 49,152 tokens."""
        tokenizer = TokenizerWrapper(_Table(self._tokenizer, self._vocab))
        return LLTokenizer(tokenizer, eos_token=list(self._tokenizer.eos_ids))


class _Table:
    """A vocabulary as TokenizerWrapper wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab)]
        self.special_token_ids = [token_id for token_id in sorted(tokenizer.special_ids) if token_id < vocab]
        self._encode = tokenizer.encode_parts

    def __call__(self, text: bytes) -> list[int]:
        return self._encode([text.decode(errors="replace")])


def _grammar(spec: StructuredOutputs) -> str:
    """In llguidance's own form."""
    if spec.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(_quoted(spec.choice)))
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.grammar is not None:
        return LLMatcher.grammar_from_lark(spec.grammar)
    return LLMatcher.grammar_from_json_schema(
        spec.source, overrides={"lenient": False, "whitespace_pattern": JSON_BLANKS}
    )


def _quoted(texts: Iterable[str]) -> Iterable[str]:
    """As Lark's strings, which are JSON's."""
    return map(json.dumps, texts)
