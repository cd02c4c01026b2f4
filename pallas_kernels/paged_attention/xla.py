"""Paged attention in plain XLA: a loop over blocks of positions with a running softmax.

Block borders stand at absolute positions whatever the page size, each row visits only the blocks it sees, and a block
visited in vain (a longer mate is still at work) changes no bit of the row.  So the cost follows the lengths and the
window, never the page table's width, and a row's result does not depend on its mates.

Shaped for XLA's CPU backend, where gathering a block costs as much as its dots: blocks small enough to stay in the
caches, keys and values fetched apart, whole pages as flat rows.  Any backend runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 64  # positions a step: keys and values stay in the caches between their gather and their dot
LOWEST = -1e30  # a score never reached; finite, so that the difference of two is 0 and not NaN


class _Rows(NamedTuple):
    """W rows of a step, as the loop needs them.  Q queries, G = N / K query heads a kv head, P pages."""

    query: Array  # [W, K, Q, G, H]
    position: Array  # [W, Q] int32  -1 = no query
    table: Array  # [W, P] int32  row of the pool that holds each page
    low: Array  # [W] int32  lowest position any query sees
    high: Array  # [W] int32  one past the highest


class _Softmax(NamedTuple):
    """The running softmax of W rows, float32."""

    top: Array  # [W, K, Q, G]  highest score so far
    total: Array  # [W, K, Q, G]  sum of exp(score - top)
    out: Array  # [W, K, Q, G, H]  sum of exp(score - top) * value


def paged_attention(
    q: Array,
    data: Array,
    scale: Array | None,
    layer: Array,
    page_table: Array,
    kv_len: Array,
    q_len: Array,
    *,
    num_pages: int,
    scale_factor: float,
    window: Array,
    softcap: float,
) -> Array:
    """q: [R, Q, N, H] -> [R, Q, N, H].  See the package's `paged_attention`."""
    kv_heads, page_size = data.shape[2:4]
    block = _block_len(page_size)

    def attend_block(step: Array, rows: _Rows, state: _Softmax) -> _Softmax:
        index = rows.low // block + step  # [W]  each row's own block; past `high` nothing is seen
        at = index[:, None] * block + lax.iota(jnp.int32, block)[None, :]  # [W, B]
        key, value = (_fetch(data, scale, rows.table, index, side, block=block) for side in (0, 1))
        sees = at[:, None] <= rows.position[..., None]  # [W, Q, B]
        sees &= (window <= 0) | (at[:, None] > rows.position[..., None] - window)
        sees = sees[:, None, :, None]
        holds = (at >= rows.low[:, None]) & (at < rows.high[:, None])  # [W, B]
        value = jnp.where(holds[:, None, :, None], value, 0)
        score = _scores(rows.query, key) * scale_factor  # [W, K, Q, G, B]
        if softcap:
            score = softcap * jnp.tanh(score / softcap)
        score = jnp.where(sees, score, LOWEST)
        top = jnp.maximum(state.top, score.max(-1))
        weight = jnp.where(sees, jnp.exp(score - top[..., None]), 0)
        keep = jnp.exp(state.top - top)
        out = state.out * keep[..., None] + _weighted_sum(weight, value)
        return _Softmax(top, state.total * keep + _sum(weight), out)

    rows = _prepare(q, layer * num_pages + page_table, kv_len, q_len, window, kv_heads=kv_heads)
    state = _loop(attend_block, rows, block=block)
    out = state.out / jnp.where(state.total > 0, state.total, 1)[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def _block_len(page_size: int) -> int:
    """Positions a step: BLOCK when pages divide it or it divides a page, else as many whole pages, at least one."""
    return BLOCK if page_size % BLOCK == 0 else max(1, BLOCK // page_size) * page_size


def _prepare(q: Array, table: Array, kv_len: Array, q_len: Array, window: Array, *, kv_heads: int) -> _Rows:
    num_rows, queries, heads, head_dim = q.shape
    query = q.reshape(num_rows, queries, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 1, 3, 4)
    q_len = jnp.where(kv_len > 0, q_len, 0)
    i = lax.iota(jnp.int32, queries)[None, :]
    start = kv_len - q_len
    position = jnp.where(i < q_len[:, None], start[:, None] + i, -1)
    high = jnp.where(q_len > 0, kv_len, 0)
    low = jnp.where((window > 0) & (q_len > 0), jnp.maximum(start - window + 1, 0), 0)
    return _Rows(query, position, table, low, high)


def _loop(attend_block: Callable[[Array, _Rows, _Softmax], _Softmax], rows: _Rows, *, block: int) -> _Softmax:
    """Runs the blocks of all rows together, the longest first; the shorter half is dropped once all of it has ended."""
    num_rows = rows.query.shape[0]
    state = _Softmax(
        jnp.full(rows.query.shape[:-1], LOWEST, jnp.float32),
        jnp.zeros(rows.query.shape[:-1], jnp.float32),
        jnp.zeros(rows.query.shape, jnp.float32),
    )
    steps = -(-rows.high // block) - rows.low // block  # [R]
    widths = sorted({num_rows, max(1, num_rows // 2)}, reverse=True)
    order = jnp.argsort(-steps)
    rows, steps = _Rows(*(field[order] for field in rows)), steps[order]
    step, ended = jnp.int32(0), []
    for width, narrower in zip(widths, [*widths[1:], 0], strict=True):
        rows = _Rows(*(field[:width] for field in rows))
        state = _Softmax(*(field[:width] for field in state))
        until = steps[narrower]

        def advance(carry: tuple[Array, _Softmax], rows: _Rows = rows) -> tuple[Array, _Softmax]:
            return carry[0] + 1, attend_block(carry[0], rows, carry[1])

        step, state = lax.while_loop(lambda carry, until=until: carry[0] < until, advance, (step, state))
        ended.append(_Softmax(*(field[narrower:] for field in state)))
    back = jnp.argsort(order)
    return _Softmax(*(jnp.concatenate(parts[::-1])[back] for parts in zip(*ended, strict=True)))


def _fetch(data: Array, scale: Array | None, table: Array, index: Array, side: int, *, block: int) -> Array:
    """Block `index` [W] of each row's keys (side 0) or values (side 1) -> [W, K, B, H]."""
    block_of = _page_blocks(data, table, index, side, block=block)
    if scale is None:
        return block_of
    return block_of.astype(jnp.float32) * _page_blocks(scale[..., None], table, index, side, block=block)


def _page_blocks(data: Array, table: Array, index: Array, side: int, *, block: int) -> Array:
    """[L * NP, 2, K, T, H] -> [W, K, B, H]"""
    pool_rows, _, kv_heads, page_size, head_dim = data.shape
    num_rows = table.shape[0]
    if page_size > block:
        parts = page_size // block
        column = jnp.minimum(index // parts, table.shape[1] - 1)
        page = jnp.take_along_axis(table, column[:, None], 1)[:, 0] * 2 + side
        split = data.reshape(pool_rows * 2, kv_heads, parts, block, head_dim)
        return split.at[page, :, index % parts].get(mode="promise_in_bounds")
    pages = block // page_size
    column = index[:, None] * pages + lax.iota(jnp.int32, pages)[None, :]
    page = jnp.take_along_axis(table, jnp.minimum(column, table.shape[1] - 1), 1) * 2 + side  # [W, pages]
    whole = lax.platform_dependent(data, page, cpu=_gather_flat, default=_gather_pages)  # [W, pages, K, T, H]
    return whole.transpose(0, 2, 1, 3, 4).reshape(num_rows, kv_heads, block, head_dim)


def _gather_flat(data: Array, page: Array) -> Array:
    """Each page one contiguous row: the fastest gather on CPU.  An accelerator's tiled layout would have to be undone for
    it, by a copy of the whole pool."""
    pool_rows, _, *page_shape = data.shape
    flat = data.reshape(pool_rows * 2, -1).at[page].get(mode="promise_in_bounds")
    return flat.reshape(*page.shape, *page_shape)


def _gather_pages(data: Array, page: Array) -> Array:
    pool_rows, _, *page_shape = data.shape
    return data.reshape(pool_rows * 2, *page_shape).at[page].get(mode="promise_in_bounds")


def _scores(query: Array, key: Array) -> Array:
    """query [W, K, Q, G, H], key [W, K, B, H] -> [W, K, Q, G, B] float32"""
    flat, key = _common(query.reshape(*query.shape[:2], -1, query.shape[-1]), key)  # [W, K, Q * G, H]
    numbers = (((3,), (3,)), ((0, 1), (0, 1)))  # keys on the left: a little faster for few queries
    score = lax.dot_general(key, flat, numbers, precision=_precision(key), preferred_element_type=jnp.float32)
    return score.swapaxes(2, 3).reshape(*query.shape[:-1], key.shape[2])


def _weighted_sum(weight: Array, value: Array) -> Array:
    """weight [W, K, Q, G, B] float32, value [W, K, B, H] -> [W, K, Q, G, H] float32"""
    flat = weight.reshape(*weight.shape[:2], -1, weight.shape[-1]).astype(value.dtype)  # [W, K, Q * G, B]
    numbers = (((3,), (2,)), ((0, 1), (0, 1)))
    out = lax.dot_general(flat, value, numbers, precision=_precision(value), preferred_element_type=jnp.float32)
    return out.reshape(*weight.shape[:-1], value.shape[-1])


def _sum(weight: Array) -> Array:
    """[W, K, Q, G, B] -> [W, K, Q, G].  A dot: XLA's CPU reduction adds up in an order that depends on W."""
    ones = jnp.ones(weight.shape[-1], weight.dtype)
    return lax.dot_general(weight, ones, (((4,), (0,)), ((), ())), precision=_precision(weight))


def _common(a: Array, b: Array) -> tuple[Array, Array]:
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


def _precision(operand: Array) -> lax.Precision:
    return lax.Precision.HIGHEST if operand.dtype == jnp.float32 else lax.Precision.DEFAULT
