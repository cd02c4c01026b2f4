"""Plan -> arrays, arrays -> outcome: the one place where host numbers and device arrays meet.

Pure functions on numpy.  dtypes are checked here, since a compiled program takes an int64 array without a word, and so
are page ids, since JAX clips a bad index in silence.  Every array is new: the CPU backend may read it after dispatch."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxserve.device.sampling import DRAWN_WIDTH
from jaxserve.device.slots import FLOATS, INTS, LOAD_HEAD, load_width
from jaxserve.device.state import RowFlag, SlotShape
from jaxserve.device.steps import HEAD, SCORED_WIDTH
from jaxserve.request import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from jaxserve.sched.plan import Call, Row, RowOutcome, SlotLoad

INT32 = np.dtype(np.int32)
# Plain ints: an enum's own operators cost a microsecond each, once a row and step.
TAKES_TOKEN, LOGPROBS, MASK = int(RowFlag.TAKES_TOKEN), int(RowFlag.LOGPROBS), int(RowFlag.MASK)
DRAFTED = int(RowFlag.DRAFTED)


def sampler_flags(params: SamplingParams) -> int:
    """The parts of the sampler that a sequence needs, whatever its step."""
    flags = RowFlag(0)
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        flags |= RowFlag.PENALTIES
    if params.logit_bias or params.banned_token_ids:
        flags |= RowFlag.BIAS
    if params.allowed_token_ids is not None:
        flags |= RowFlag.ALLOWED
    if params.min_tokens:
        flags |= RowFlag.MIN_TOKENS
    if params.temperature > 0:
        flags |= RowFlag.SAMPLED
        if params.top_k or params.top_p < 1 or params.min_p:
            flags |= RowFlag.TRUNCATED
    return int(flags)


def pack_load(load: SlotLoad, shape: SlotShape) -> np.ndarray:
    """-> [load_width] int32, the argument of `load_slot`."""
    params = load.params
    seed = np.array([load.seed], np.uint64).view(np.int32)  # low word, high word
    ints = {
        "slot": load.slot, "length": len(load.tokens), "prompt_len": load.prompt_len,
        "limit": load.limit, "min_len": load.min_len, "seed_low": seed[0], "seed_high": seed[1], "top_k": params.top_k,
    }  # fmt: skip
    floats = {
        "temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p,
        "presence": params.presence_penalty, "frequency": params.frequency_penalty,
        "repetition": params.repetition_penalty,
    }  # fmt: skip
    biases = dict(params.logit_bias) | dict.fromkeys(params.banned_token_ids, -math.inf)
    parts = [
        np.array([ints[name] for name in (*LOAD_HEAD, *INTS)], np.int32),
        np.array([floats[name] for name in FLOATS], np.float32).view(np.int32),
        _padded(load.stop_ids, shape.stop_ids, -1),
        _padded(tuple(biases), shape.biases, -1),
        _padded(np.array(list(biases.values()), np.float32).view(np.int32), shape.biases, 0),
        _padded(params.allowed_token_ids or (), shape.allowed_ids, -1),
        _padded(load.tokens, shape.max_len, 0),
    ]
    packed = np.concatenate(parts)
    assert packed.dtype == INT32 and packed.shape == (load_width(shape),), (packed.dtype, packed.shape)
    return packed


def _padded(values, width: int, fill: int) -> np.ndarray:
    assert len(values) <= width, f"{len(values)} values for a width of {width}: the engine must refuse this request"
    out = np.full(width, fill, np.int32)
    out[: len(values)] = values
    return out


def pack_call(
    call: Call, flags: Mapping[int, int], *, scrap_slot: int, columns: int, num_pages: int,
    last: tuple[Call, np.ndarray] | None = None,
) -> np.ndarray:  # fmt: skip
    """One call's rows -> [rows_bucket, HEAD + P] int32; missing rows are inert and name the scrap slot.

    flags: slot -> `sampler_flags` of its owner.  last: a call and what was packed of it; rows that are the very same are
    not packed again, and when all are, its array is this call's too."""
    if last and last[0] is call:
        return last[1]
    changed = list(enumerate(call.rows))
    if last and last[0].rows_bucket == call.rows_bucket and len(last[0].rows) == len(call.rows):
        changed = [(i, row) for (i, row), before in zip(changed, last[0].rows, strict=True) if row is not before]
        if not changed:
            return last[1]
        packed = last[1].copy()
    else:
        packed = np.zeros((call.rows_bucket, HEAD + columns), np.int32)
        packed[len(call.rows) :, 0] = scrap_slot
    for i, row in changed:
        packed[i, :HEAD] = row.slot, row.q_len, row.start, _row_flags(row, flags[row.slot])
        packed[i, HEAD : HEAD + len(row.pages)] = row.pages
        packed[i, HEAD + len(row.pages) :] = 0
    pages = packed[:, HEAD:]
    assert packed.dtype == INT32 and pages.min() >= 0 and pages.max() < num_pages, "page id outside the pool"
    return packed


def _row_flags(row: Row, flags: int) -> int:
    if row.takes_token:
        flags |= TAKES_TOKEN
    if row.logprobs is not None:
        flags |= LOGPROBS
    if row.masked:
        flags |= MASK
    if row.is_drafted:
        flags |= DRAFTED
    return flags


def pack_masks(masks: Mapping[int, np.ndarray], rows: int, positions: int, vocab: int) -> np.ndarray:
    """{row: [positions or fewer, W] uint32} -> [rows, W] for one position, [rows, positions, W] for several.

    A row without a mask allows every id; positions that a row's mask lacks allow none."""
    packed = np.full((rows, positions, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    for i, words in masks.items():
        assert words.dtype == np.uint32, words.dtype
        packed[i, : len(words)] = words
        packed[i, len(words) :] = 0
    return packed if positions > 1 else packed[:, 0]


def read_drafts(call: Call, tokens: np.ndarray, count: np.ndarray) -> dict[int, list[int]]:
    """tokens [rows, K or more], count [rows] int32 of `propose` -> the masked rows' drafts that the call verifies, by
    sequence."""
    return {
        row.sequence: tokens[i, : min(int(count[i]), row.q_len - 1, call.queries - 1)].tolist()
        for i, row in enumerate(call.rows)
        if row.masked
    }


def read_call(call: Call, drawn: np.ndarray, scored: dict[int, np.ndarray]) -> list[RowOutcome]:
    """drawn [rows_bucket, DRAWN_WIDTH] int32 of `sample` and, for rows that asked, scored {row: [entries, SCORED_WIDTH]}
    -> outcomes."""
    assert drawn.shape[1] == DRAWN_WIDTH
    outcomes = []
    tokens, is_nan = drawn[:, 0].tolist(), drawn[:, 1].tolist()
    for i, row in enumerate(call.rows):
        outcome = _one(tokens[i])
        if is_nan[i] > 0 and outcome.token_ids:
            outcome = replace(outcome, is_nan=True)
        if row.logprobs is not None and outcome.token_ids:
            outcome = replace(outcome, logprobs=(_token_logprobs(tokens[i], drawn[i, 2:], row.logprobs),))
        outcomes.append(outcome)
    for i, entries in scored.items():
        outcomes[i] = replace(outcomes[i], prompt_logprobs=_read_scored(call.rows[i], entries))
    return outcomes


@functools.lru_cache(maxsize=1 << 13)
def _one(token: int) -> RowOutcome:
    """A row that drew this token and nothing else is to be said of; negative = none.  Kept: one a row and step is read,
    and most are of the same few tokens."""
    return RowOutcome((token,)) if token >= 0 else RowOutcome()


def read_verified(call: Call, drawn: np.ndarray) -> list[RowOutcome]:
    """drawn [rows_bucket, 1 + (K+1) * DRAWN_WIDTH] int32 of `accept` -> outcomes."""
    drafted = drawn[:, 0].tolist()
    draws = drawn[:, 1:].reshape(drawn.shape[0], -1, DRAWN_WIDTH)  # each row's taken ones first
    tokens = draws[:, :, 0].tolist()
    is_nan = draws[:, :, 1].tolist()
    outcomes = []
    for i, row in enumerate(call.rows):
        token_ids = tuple([token for token in tokens[i] if token >= 0])
        logprobs = None
        if row.logprobs is not None and token_ids:
            entries = zip(token_ids, draws[i, :, 2:], strict=False)  # the draws behind the last taken one mean nothing
            logprobs = tuple([_token_logprobs(token, words, row.logprobs) for token, words in entries])
        outcomes.append(
            RowOutcome(
                token_ids=token_ids,
                logprobs=logprobs,
                is_nan=any(is_nan[i][: len(token_ids)]),
                drafted=drafted[i] if token_ids else 0,
            )
        )
    return outcomes


def _token_logprobs(token_id: int, words: np.ndarray, top: int) -> TokenLogprobs:
    """words: rank, logprob bits, top ids, top logprob bits."""
    logprob = words[1:2].view(np.float32)[0]
    ids = words[2 : 2 + top].tolist()
    values = words[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + top].view(np.float32).tolist()
    return TokenLogprobs(token_id, float(logprob), int(words[0]), tuple(zip(ids, values, strict=True)))


def _read_scored(row: Row, scored: np.ndarray) -> tuple[TokenLogprobs, ...]:
    """Entry i scores the token at `prompt_logprobs_from` + i + 1; the chunk's last query scores the token after it."""
    assert row.prompt_logprobs is not None and scored.shape[1] == SCORED_WIDTH
    wanted = scored[: row.start + row.q_len - row.prompt_logprobs_from]
    return tuple(_token_logprobs(int(words[0]), words[1:], row.prompt_logprobs) for words in wanted)
