"""Paged attention written to be read: every row's pages laid side by side, one plain softmax.

Memory and time grow with the page table's width, not with the lengths.  The oracle of the fast backends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


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
    """q: [R, Q, N, H] -> [R, Q, N, H].  See the package's `paged_attention`; all arithmetic in float32."""
    pages = layer * num_pages + page_table
    kv = data[pages].astype(jnp.float32)  # [R, P, 2, K, T, H]
    if scale is not None:
        kv = kv * scale[pages].astype(jnp.float32)[..., None]
    rows, width, _, kv_heads, page_size, head_dim = kv.shape
    kv = kv.transpose(2, 0, 3, 1, 4, 5).reshape(2, rows, kv_heads, width * page_size, head_dim)

    def attend_row(query, key, value, kv_len, q_len):
        """query [Q, N, H], key and value [K, S, H] -> [Q, N, H]"""
        i = jnp.arange(query.shape[0])[:, None]
        at = jnp.arange(key.shape[1])[None, :]
        position = kv_len - q_len + i
        sees = (at <= position) & (at < kv_len) & (i < q_len)  # [Q, S]
        sees &= (window <= 0) | (at > position - window)
        value = jnp.where(sees.any(0)[:, None], value, 0)
        query = query.reshape(query.shape[0], kv_heads, -1, head_dim)
        score = jnp.einsum("qkgh,ksh->kgqs", query, key, precision=lax.Precision.HIGHEST) * scale_factor
        if softcap:
            score = softcap * jnp.tanh(score / softcap)
        score = jnp.where(sees, score, -jnp.inf)
        top = jnp.max(score, -1, keepdims=True)
        weight = jnp.where(sees, jnp.exp(score - top), 0)
        weight = weight / jnp.where(sees.any(-1, keepdims=True), weight.sum(-1, keepdims=True), 1)
        return jnp.einsum("kgqs,ksh->qkgh", weight, value, precision=lax.Precision.HIGHEST)

    out = jax.vmap(attend_row)(q.astype(jnp.float32), kv[0], kv[1], kv_len, q_len)
    return out.reshape(q.shape).astype(q.dtype)
