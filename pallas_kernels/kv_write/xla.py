"""KV write as a scatter of whole rows into the pool seen as [L * NP * 2 * K * T, H].

This form alone keeps every compiler writing in place: with more index dimensions the TPU compiler copies the pool
once per layer."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def kv_write(
    data: Array,
    layer: Array,
    k: Array,
    v: Array,
    page_table: Array,
    positions: Array,
    valid: Array,
    *,
    num_pages: int,
) -> Array:
    """See the package's `kv_write`."""
    _, _, kv_heads, page_size, head_dim = data.shape
    # An invalid position may be anything: it must not index the table out of range either.
    column = jnp.where(valid, positions // page_size, 0)
    page = layer * num_pages + jnp.where(valid, jnp.take_along_axis(page_table, column, 1), 0)  # [R, Q]
    offset = jnp.where(valid, positions % page_size, 0)
    side = page[..., None] * 2 + jnp.arange(2, dtype=jnp.int32)[None, None, :]  # [R, Q, 2]: keys, values
    head = side[..., None] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, None, None, :]  # [R, Q, 2, K]
    row = head * page_size + offset[..., None, None]
    new = jnp.stack([k, v], 2).reshape(-1, head_dim)
    # Without unique_indices: invalid positions share the scrap page's first row.
    return data.reshape(-1, head_dim).at[row.reshape(-1)].set(new).reshape(data.shape)
