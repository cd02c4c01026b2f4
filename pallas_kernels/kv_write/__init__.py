"""Writing a step's keys and values into the pages of the KV pool: the contract and its checks.

Letters: R rows, Q queries a row, K kv heads, H head dim, L layers, NP pages a layer, T tokens a page, P pages a row."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.registry import implementation


def kv_write(
    data: Array,
    layer: Array | int,
    k: Array,
    v: Array,
    page_table: Array,
    positions: Array,
    valid: Array,
    *,
    num_pages: int,
    backend: str = "xla",
) -> Array:
    """data: [L * NP, 2, K, T, H'] -> the same with k and v ([R, Q, K, H], H <= H', zeros past H) written at
    `positions` [R, Q] of each row's pages (`page_table` [R, P] int32, of this layer).

    Where `valid` [R, Q] is false the write goes to page 0 of the layer, the scrap page, whatever the position says.
    In place when data is donated.  Raises ValueError with the shapes and dtypes it cannot serve."""
    _check(data, k, v, page_table, positions, valid, num_pages)
    pad = ((0, 0), (0, 0), (0, 0), (0, data.shape[-1] - k.shape[-1]))
    k, v = (jnp.pad(new.astype(data.dtype), pad) for new in (k, v))
    write = implementation("kv_write", backend)
    return write(data, jnp.asarray(layer, jnp.int32), k, v, page_table, positions, valid, num_pages=num_pages)


def _check(data: Array, k: Array, v: Array, page_table: Array, positions: Array, valid: Array, num_pages: int) -> None:
    if data.ndim != 5 or data.shape[1] != 2 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"data must be [L*NP, 2, K, T, H], k and v [R, Q, K, H], got {data.shape}, {k.shape}, {v.shape}"
        )
    if data.shape[2] != k.shape[2] or data.shape[4] < k.shape[3]:
        raise ValueError(
            f"k of {k.shape[2]} heads of {k.shape[3]} does not fit a pool of {data.shape[2]} of {data.shape[4]}"
        )
    if num_pages < 1 or data.shape[0] % num_pages:
        raise ValueError(f"{data.shape[0]} pool rows are no multiple of {num_pages=}")
    if data.dtype.itemsize == 1:
        raise ValueError(f"a pool of {data.dtype} is written with scales, which this operation does not know")
    if data.size // data.shape[-1] > 2**31 - 1:
        raise ValueError(f"a pool of {data.size // data.shape[-1]} rows of {data.shape[-1]} is past int32")
    if page_table.ndim != 2 or page_table.shape[0] != k.shape[0]:
        raise ValueError(f"page_table {page_table.shape} must be [R, P] with R={k.shape[0]}")
    if positions.shape != k.shape[:2] or valid.shape != k.shape[:2]:
        raise ValueError(f"positions {positions.shape} and valid {valid.shape} must be [R, Q] = {k.shape[:2]}")
    if page_table.dtype != jnp.int32 or positions.dtype != jnp.int32 or valid.dtype != jnp.bool_:
        raise ValueError(
            f"page_table, positions, valid must be int32, int32, bool, got {page_table.dtype}, {positions.dtype}, {valid.dtype}"
        )
