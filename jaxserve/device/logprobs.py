"""Logprobs of the model's own distribution: log-softmax of the raw logits, before every rule of sampling.

Never alters a draw."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxserve.request import MAX_LOGPROBS

_BLOCK = 64  # positions scored at once: bounds the logits held, [64, V]


@struct.dataclass
class Scores:
    """One chosen token per row, and the most likely ones by descending logprob (equal ones by ascending id)."""

    logprob: Array  # [R] float32
    rank: Array  # [R] int32  1 + the number of strictly more likely tokens
    top_ids: Array  # [R, MAX_LOGPROBS] int32  -1 = none (a vocabulary that small)
    top_logprobs: Array  # [R, MAX_LOGPROBS] float32

    @staticmethod
    def zeros(rows: int) -> Scores:
        return Scores(
            logprob=jnp.zeros((rows,), jnp.float32),
            rank=jnp.zeros((rows,), jnp.int32),
            top_ids=jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
            top_logprobs=jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
        )


def score(logits: Array, token: Array) -> Scores:
    """logits [R, V] float32, token [R] int32.  A token among the top has the same logprob there, bit for bit: both
    are (logit - max) - log(sum) of the same three numbers."""
    best = jnp.max(logits, axis=-1, keepdims=True)  # [R, 1]
    log_sum = jnp.log(jnp.sum(jnp.exp(logits - best), axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)
    width = min(MAX_LOGPROBS, logits.shape[-1])
    top, top_ids = lax.top_k(logits, width)
    padding = ((0, 0), (0, MAX_LOGPROBS - width))
    return Scores(
        logprob=((chosen - best) - log_sum)[:, 0],
        rank=1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_ids=jnp.pad(top_ids, padding, constant_values=-1),
        top_logprobs=jnp.pad((top - best) - log_sum, padding, constant_values=-jnp.inf),
    )


def prompt_logprobs(
    logits_of: Callable[[Array], Array], hidden: Array, targets: Array
) -> tuple[Array, Array, Array, Array]:
    """Score targets[i] by the logits of hidden[i], block by block, so that [C, V] logits never stand in memory.

    logits_of: [64, D] -> [64, V]; hidden [C, D], targets [C] int32 -> logprob [C], rank [C], top ids and top logprobs
    [C, MAX_LOGPROBS]."""
    count, width = hidden.shape
    blocks = -(-count // _BLOCK)
    padding = blocks * _BLOCK - count
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(blocks, _BLOCK, width)
    targets = jnp.pad(targets, (0, padding)).reshape(blocks, _BLOCK)

    def score_block(carry: None, block: tuple[Array, Array]) -> tuple[None, Scores]:
        return carry, score(logits_of(block[0]).astype(jnp.float32), block[1])

    _, scores = lax.scan(score_block, None, (hidden, targets))
    logprob, rank, top_ids, top_logprobs = (
        part.reshape(blocks * _BLOCK, *part.shape[2:])[:count]
        for part in (scores.logprob, scores.rank, scores.top_ids, scores.top_logprobs)
    )
    return logprob, rank, top_ids, top_logprobs
