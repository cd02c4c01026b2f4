"""KV write, one position at a time: slow and obvious."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


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
    rows, queries = positions.shape
    page_size = data.shape[3]

    def write(n, data):
        r, i = n // queries, n % queries
        page = jnp.where(valid[r, i], page_table[r, positions[r, i] // page_size], 0)
        new = jnp.stack([k[r, i], v[r, i]])  # [2, K, H]
        return data.at[layer * num_pages + page, :, :, positions[r, i] % page_size].set(new)

    return lax.fori_loop(0, rows * queries, write, data)
