"""What a caller asks for, and what comes back.  Plain data that any thread or process may carry.

Standard library only: no jax, no sockets.  Every value is checked here, once, when it is made; what depends on a
model or on the engine's limits (ids, widths, context) is checked by `jaxserve.engine` when the request is submitted."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.constraints import StructuredOutputs
from jaxserve.errors import ErrorCode, RequestError

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
INT32_MAX = 2**31 - 1


class FinishReason(enum.Enum):
    STOP = "stop"  # a stop id, a stop string or an end-of-sequence id
    LENGTH = "length"  # max_tokens or the context
    ABORT = "abort"  # the caller left, a deadline passed, the server drains
    ERROR = "error"  # Chunk.error says which, and Chunk.error_code whose


class MaskError(Exception):
    """A mask has no token to allow, or cannot be worked out: its sequence ends, and nothing else."""

    def __init__(self, message: str, *, code: ErrorCode = ErrorCode.INVALID_ARGUMENT):
        super().__init__(message)
        self.code = code
        self.message = message


class TokenMask(Protocol):
    """Says which token may come next, from the tokens so far (a grammar, bad words).  Driven by the engine's loop;
    its methods may raise MaskError."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were generated."""
        ...

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens (rejected drafts, preemption)."""
        ...

    def words(self) -> bytes:
        """The mask for the next token: ceil(V/32) little-endian uint32 words, bit i of word w allows id 32*w + i."""
        ...


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a number, got {value!r}", field=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}", field=name)


def _check_int(name: str, value: int, low: int, high: int = INT32_MAX) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", field=name)
    _check_range(name, value, low, high)


def _ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    for token_id in ids:
        _check_int(name, token_id, 0)
    return tuple(dict.fromkeys(ids))


def _bad_words(words: Sequence[str]) -> tuple[str, ...]:
    if isinstance(words, str):
        raise RequestError("bad_words must be a list of texts", field="bad_words")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError("bad_words must hold texts that are not blank", field="bad_words")
    return tuple(dict.fromkeys(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw one request's tokens.  Names and ranges follow vLLM's SamplingParams.

    The order of the rules: penalties, bias, allowed / banned ids and `min_tokens`; temperature; min-p; top-k; top-p.
    `max_tokens=None` means as many as the context allows.  `temperature=0` is greedy.  `top_k` 0 or -1 is off.
    Logprobs are those of the model (log-softmax of the raw logits), before any rule.
    With `structured_outputs`, `ignore_eos` and `min_tokens` hold the end back for as long as the answer may go on;
    when nothing but the end is left, the answer ends.
    Raises RequestError naming the field and the limits.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # 0 = the chosen token's only
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0  # positions before it get no entry, and may be prefix hits
    detokenize: bool = True
    skip_special_tokens: bool = True
    speculate: bool = True  # False: no drafts for this request; they change no token, only the time it takes
    bad_words: Sequence[str] = ()  # texts whose last token is never drawn behind the others
    structured_outputs: StructuredOutputs | None = None  # what the whole answer must match

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}", field="min_tokens"
            )
        _check_int("n", self.n, 1, MAX_SAMPLES)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, -1)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 (and at most 1); for greedy use temperature=0", field="top_p")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)  # nearer to 0 a logit overflows
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise RequestError(f"seed must be an integer, got {self.seed!r}", field="seed")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed must fit 64 bits, got {self.seed}", field="seed")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        _check_int("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", field=name)
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise RequestError("structured_outputs must be a StructuredOutputs", field="structured_outputs")
        self._normalise()

    @property
    def ends_at_eos(self) -> bool:
        """A structured answer ends with its grammar, and that end is an end-of-sequence id, ignored or not."""
        return not self.ignore_eos or self.structured_outputs is not None

    def _normalise(self) -> None:
        put = object.__setattr__
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0)
            _check_range("logit_bias", bias, -100.0, 100.0)
        put(self, "logit_bias", dict(self.logit_bias))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: no token could be drawn", field="allowed_token_ids")
        put(self, "banned_token_ids", _ids("banned_token_ids", self.banned_token_ids))
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not isinstance(text, str) or not text for text in stop):
            raise RequestError("stop must hold non-empty strings", field="stop")
        if stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", field="stop")
        put(self, "stop", stop)
        put(self, "bad_words", _bad_words(self.bad_words))
        put(self, "top_k", 0 if self.top_k == -1 else self.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One caller's request, already tokenised.  `n` samples are n sequences under one id; sequence `index` of n has
    its own seed (`child_seed`).  A request without a seed is given a random one before it is queued."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # higher goes first
    cache_salt: str = ""  # prefixes are shared only between requests of one salt
    deadline: float | None = None  # on the engine's clock (time.monotonic seconds); past it the request is aborted
    make_mask: Callable[[], TokenMask] | None = None  # one mask object per sequence; made by `Engine.prepare`
    shown_ids: frozenset[int] = frozenset()  # special tokens that the text shows although it skips special tokens


def child_seed(seed: int, index: int) -> int:
    """The 64-bit seed of sample `index` of a request: sample 0 keeps the request's own, so n=1 equals the first of n."""
    if index == 0:
        return seed % 2**64
    digest = hashlib.blake2b(f"{seed % 2**64}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the token that stands there and the most likely ones, by descending logprob (ids, never strings:
    two ids may decode to the same text)."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix table
    drafts: int = 0  # proposals that were verified
    drafted_tokens: int = 0  # tokens they held
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When it happened to one sequence, on the engine's clock (time.monotonic seconds); None = it never did."""

    arrived: float
    admitted: float | None = None  # for the first time: the end of its queueing
    first_token: float | None = None
    ended: float


@dataclass(slots=True, kw_only=True)  # not frozen: one a row and step is made, and the loop fills it in
class Chunk:
    """What one step added to one sequence.  `text` is None until it has been decoded (plain rows are decoded by the
    reader, rows with stop strings by the loop); `usage`, `times` and `finish_reason` come once, in the last chunk."""

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, with the first chunk; entry 0 is None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that matched; None for end of sequence
    usage: Usage | None = None
    times: Times | None = None
    error: str | None = None
    error_code: ErrorCode = ErrorCode.INTERNAL  # of `error`: whose fault it was
    seed: int | None = None  # the request's seed (given or drawn), in the last chunk
