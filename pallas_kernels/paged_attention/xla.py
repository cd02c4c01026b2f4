"""Paged attention in plain XLA: a loop over blocks of positions with a running softmax.

The number of blocks visited follows the longest row (and the window), never the page table's width.  Block borders
stand at absolute positions whatever the page size, and a block that a row does not see changes no bit of its result."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 128  # positions a loop step
LOWEST = -1e30  # a score never reached; finite, so that the difference of two is 0 and not NaN


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
    rows, queries, heads, head_dim = q.shape
    kv_heads, page_size = data.shape[2:4]
    block = _block_len(page_size)
    compute = q.dtype if scale is None and data.dtype == q.dtype else jnp.float32
    precision = lax.Precision.HIGHEST if compute == jnp.float32 else lax.Precision.DEFAULT
    query = q.reshape(rows, queries, kv_heads, heads // kv_heads, head_dim).astype(compute)
    i = jnp.arange(queries, dtype=jnp.int32)
    position = (kv_len - q_len)[:, None] + i  # [R, Q]
    is_query = (i < q_len[:, None]) & (kv_len > 0)[:, None]

    def fetch(array, j):
        """Block j of every row, of the pool or its scales: [L*NP, 2, K, T, ...] -> [2, R, K, block, ...]"""
        if page_size > block:
            parts = page_size // block
            array = array.reshape(*array.shape[:3], parts, block, *array.shape[4:])
            page = lax.dynamic_index_in_dim(table, j // parts, 1, keepdims=False)
            return jnp.moveaxis(array[page, :, :, j % parts], 1, 0)
        page = lax.dynamic_slice_in_dim(table, j * (block // page_size), block // page_size, 1)
        got = jnp.moveaxis(array[page], (2, 1), (0, 3))  # [2, R, K, pages, T, ...]
        return got.reshape(2, rows, kv_heads, block, *array.shape[4:])

    def attend_block(carry):
        j, top, total, out = carry
        kv = fetch(data, j).astype(compute)
        if scale is not None:
            kv = kv * fetch(scale, j).astype(compute)[..., None]
        at = j * block + jnp.arange(block, dtype=jnp.int32)
        sees = (at <= position[..., None]) & is_query[..., None]  # [R, Q, block]
        sees &= (window <= 0) | (at > position[..., None] - window)
        value = jnp.where(sees.any(1)[:, None, :, None], kv[1], 0)
        sees = sees[:, None, None]
        score = jnp.einsum("rqkgh,rksh->rkgqs", query, kv[0], precision=precision, preferred_element_type=jnp.float32)
        score = score * scale_factor
        if softcap:
            score = softcap * jnp.tanh(score / softcap)
        score = jnp.where(sees, score, LOWEST)
        new_top = jnp.maximum(top, score.max(-1))
        weight = jnp.where(sees, jnp.exp(score - new_top[..., None]), 0)
        keep = jnp.exp(top - new_top)
        add = jnp.einsum("rkgqs,rksh->rkgqh", weight.astype(compute), value, precision=precision, preferred_element_type=jnp.float32)
        return j + 1, new_top, total * keep + weight.sum(-1), out * keep[..., None] + add

    pages_per_block = max(1, block // page_size)
    table = layer * num_pages + jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_block)))
    start = jnp.where(window > 0, jnp.where(is_query, position, jnp.iinfo(jnp.int32).max).min() - window + 1, 0)
    begin, end = jnp.maximum(start, 0) // block, -(-jnp.where(q_len > 0, kv_len, 0).max() // block)
    shape = (rows, kv_heads, heads // kv_heads, queries)
    state = begin, jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, head_dim), jnp.float32)
    _, _, total, out = lax.while_loop(lambda carry: carry[0] < end, attend_block, state)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)


def _block_len(page_size: int) -> int:
    """BLOCK when pages and blocks fit each other, else the most whole pages within it, or one page."""
    if page_size % BLOCK == 0:
        return BLOCK
    return max(1, BLOCK // page_size) * page_size
