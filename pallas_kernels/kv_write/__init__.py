"""Writing a step's keys and values into the pages of the KV pool: the contract and its checks.

Letters: R rows, Q queries a row, K kv heads, H head dim, L layers, NP pages a layer, T tokens a page, P pages a row."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array

from pallas_kernels.kv_write.narrow import narrow
from pallas_kernels.pool import check_scale
from pallas_kernels.registry import implementation


def kv_write(
    data: Array,
    scale: Array | None,
    layer: Array | int,
    k: Array,
    v: Array,
    page_table: Array,
    positions: Array,
    valid: Array,
    *,
    num_pages: int,
    backend: str = "xla",
) -> tuple[Array, Array | None]:
    """data: [L * NP, 2, K, T, H'], and of 8-bit pools scale: [L * NP, 2, K, T] -> the same with k and v ([R, Q, K, H],
    H <= H', zeros past H) written at `positions` [R, Q] of each row's pages (`page_table` [R, P] int32, of this layer).

    Where `valid` [R, Q] is false the write goes to page 0 of the layer, the scrap page, whatever the position says.
    In place when data and scale are donated.  Raises ValueError with the shapes and dtypes it cannot serve."""
    _check(data, scale, k, v, page_table, positions, valid, num_pages)
    write = partial(implementation("kv_write", backend), num_pages=num_pages)
    layer, where = jnp.asarray(layer, jnp.int32), (page_table, positions, valid)
    if scale is not None:
        (k, k_scale), (v, v_scale) = narrow(k, data.dtype), narrow(v, data.dtype)
        # A scale is written as its vector is: a row of one number.
        k_scale, v_scale = (new.astype(scale.dtype)[..., None] for new in (k_scale, v_scale))
        scale = write(scale[..., None], layer, k_scale, v_scale, *where)[..., 0]
    pad = ((0, 0), (0, 0), (0, 0), (0, data.shape[-1] - k.shape[-1]))
    k, v = (jnp.pad(new.astype(data.dtype), pad) for new in (k, v))
    return write(data, layer, k, v, *where), scale


def _check(
    data: Array,
    scale: Array | None,
    k: Array,
    v: Array,
    page_table: Array,
    positions: Array,
    valid: Array,
    num_pages: int,
) -> None:
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
    check_scale(data, scale)
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
