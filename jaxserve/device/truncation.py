"""min-p, top-k and top-p: which tokens may be drawn, and a draw among those alone.

Exact, without sorting the vocabulary.  What top-k and top-p keep is always "all logits from some value up", so it can
be tested for one token by what stands above it: a Gumbel-max draw is made over everything, and a row whose token is
not kept draws again, with the same noise, among the logits above that token.  The token so found is the one a mask
would have given, and two or three rounds do (the idea is FlashInfer's, "sorting-free sampling").  Equal logits are
kept or dropped together."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxserve.device.state import Rules

_INF_BITS = 0x7F800000  # of float32


@struct.dataclass
class _Limits:
    """What `truncated_draw` compares: a row that has a rule off, or is greedy, holds values nothing reaches."""

    weights: Array  # [R, V] float32  probabilities, up to one factor per row; the most likely token has 1
    top_k: Array  # [R] int32
    mass: Array  # [R] float32  weight that the kept tokens must reach


def keep_min_p(logits: Array, rules: Rules) -> Array:
    """logits [R, V] -> -inf where a token has less than min_p times the probability of the most likely one."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    min_p = jnp.where(rules.temperature == 0, 0.0, rules.min_p)[:, None]
    return jnp.where(jnp.exp(logits - best) < min_p, -jnp.inf, logits)


def truncated_draw(logits: Array, scores: Array, token: Array, rules: Rules) -> Array:
    """The token [R] of the highest score among those that top-k, then top-p, keep of logits [R, V].

    scores [R, V]: logits and noise; token [R]: the one of the highest score of all.  Top-k keeps the k most likely;
    top-p, of these, the smallest set of the most likely whose probability reaches top_p.  The most likely token is
    always kept."""
    limits = _limits(logits, rules)

    def is_unfinished(drawn: tuple[Array, Array]) -> Array:
        return jnp.any(drawn[1])

    def again(drawn: tuple[Array, Array]) -> tuple[Array, Array]:
        token, is_dropped = drawn
        floor = _pick(logits, token)
        above = jnp.where(logits > floor, scores, -jnp.inf)
        token = jnp.where(is_dropped, argmax(above)[0], token)
        # A row must rise to go on: one whose logits hold NaN may not, and would never end.
        rises = (_pick(logits, token) > floor)[:, 0]
        return token, is_dropped & rises & _is_dropped(logits, token, limits)

    return lax.while_loop(is_unfinished, again, (token, _is_dropped(logits, token, limits)))[0]


def argmax(scores: Array) -> tuple[Array, Array]:
    """[R, V] -> the lowest id of the highest score, and that score.  Two plain reductions: XLA's CPU backend does
    not vectorise the paired one of `jnp.argmax`."""
    vocab = scores.shape[-1]
    best = jnp.max(scores, axis=-1)
    ids = lax.iota(jnp.int32, vocab)[None, :]
    return jnp.min(jnp.where(scores == best[:, None], ids, vocab - 1), axis=-1), best


def _pick(values: Array, token: Array) -> Array:
    """values [R, V], token [R] -> [R, 1]"""
    return jnp.take_along_axis(values, token[:, None], axis=-1, mode="clip")


def _is_dropped(logits: Array, token: Array, limits: _Limits) -> Array:
    """[R] bool: as many as k, or as much as the mass, stand strictly above the token."""
    is_above = logits > _pick(logits, token)
    count = jnp.sum(is_above, axis=-1, dtype=jnp.int32)
    mass = jnp.sum(jnp.where(is_above, limits.weights, 0.0), axis=-1)
    return (count >= limits.top_k) | (mass >= limits.mass)


def _limits(logits: Array, rules: Rules) -> _Limits:
    is_greedy = rules.temperature == 0
    has_top_k = (rules.top_k > 0) & ~is_greedy
    has_top_p = (rules.top_p < 1) & ~is_greedy
    top_k = jnp.where(has_top_k, rules.top_k, jnp.iinfo(jnp.int32).max)
    below = jnp.max(logits, axis=-1, keepdims=True) - logits  # >= 0
    weights = jnp.exp(-below)
    # Top-p is relative to what top-k left: only a row that has both needs to know where top-k ends.
    cut = _kth_smallest(below, jnp.where(has_top_p, top_k, jnp.iinfo(jnp.int32).max))
    total = jnp.sum(jnp.where(below <= cut[:, None], weights, 0.0), axis=-1)
    return _Limits(weights=weights, top_k=top_k, mass=jnp.where(has_top_p, rules.top_p * total, jnp.inf))


def _kth_smallest(values: Array, k: Array) -> Array:
    """values [R, V] >= 0, k [R] -> [R]: a cut such that exactly the k smallest of a row, and what equals the k-th,
    are at most the cut; inf where k >= V.

    By bisection: the bits of non-negative floats, read as integers, are ordered as the floats are.  A row is done as
    soon as the count is right, or after 31 halvings."""
    vocab = values.shape[-1]
    high = jnp.full(k.shape, _INF_BITS, jnp.int32)  # bits of a cut that holds k values or more
    low = jnp.where(k >= vocab, high, -1)  # bits of one that does not
    held = jnp.full(k.shape, vocab, jnp.int32)  # values within `high`

    def is_open(low: Array, high: Array, held: Array) -> Array:
        return (high - low > 1) & (held != k)

    def halve(bounds: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, held = bounds
        middle = low + (high - low) // 2
        cut = lax.bitcast_convert_type(middle, jnp.float32)[:, None]
        count = jnp.sum(values <= cut, axis=-1, dtype=jnp.int32)
        up = is_open(*bounds) & (count < k)
        down = is_open(*bounds) & (count >= k)
        return jnp.where(up, middle, low), jnp.where(down, middle, high), jnp.where(down, count, held)

    bounds = lax.while_loop(lambda bounds: jnp.any(is_open(*bounds)), halve, (low, high, held))
    return lax.bitcast_convert_type(bounds[1], jnp.float32)
