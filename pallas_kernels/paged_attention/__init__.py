"""Attention of a step's queries over each row's pages of the KV pool: the contract and its checks.

Letters: R rows, Q queries a row, N query heads, K kv heads, H head dim, L layers, NP pages a layer, T tokens a page,
P pages a row."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.pool import check_scale
from pallas_kernels.registry import implementation
from pallas_kernels.tiles import Tiles


def paged_attention(
    q: Array,
    data: Array,
    scale: Array | None,
    layer: Array | int,
    page_table: Array,
    kv_len: Array,
    q_len: Array,
    *,
    num_pages: int,
    scale_factor: float,
    window: Array | int,
    softcap: float,
    backend: str,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Array:
    """q: [R, Q, N, H] -> [R, Q, N, H], in q's dtype; softmax and sums are float32.

    data: [L * NP, 2, K, T, H'] keys and values of every layer's pages, H' >= H with zeros past H; layer l's page p is
    row l * num_pages + p.  scale: [L * NP, 2, K, T], given for 8-bit pools only.  page_table: [R, P] int32.
    Query i of row r stands at position kv_len[r] - q_len[r] + i and sees the positions up to its own, the last `window`
    of them if window > 0.  Its scores are q.k * scale_factor, then softcap * tanh(scores / softcap) if softcap > 0.
    A row with kv_len 0 and a query i >= q_len get zeros.  What lies past kv_len, or before every query's window, may
    hold anything, NaN too.  A row's result depends on its own queries and positions alone.

    layer, window: int32 scalars, traced or not.  tiles: block sizes of a kernel that has some (`pallas_kernels.tiles`),
    None = its defaults; they may change the last bits, never the meaning.  interpret: run a Pallas kernel's body as
    plain XLA, to try it where its chip is not.  Raises ValueError with the shapes it cannot serve."""
    _check(q, data, scale, page_table, kv_len, q_len, num_pages, softcap)
    head_dim = q.shape[-1]
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, data.shape[-1] - head_dim)))
    own = ({} if tiles is None else {"tiles": tiles}) | ({"interpret": True} if interpret else {})
    out = implementation("paged_attention", backend)(
        padded, data, scale, jnp.asarray(layer, jnp.int32), page_table, kv_len, q_len,
        num_pages=num_pages, scale_factor=scale_factor, window=jnp.asarray(window, jnp.int32), softcap=softcap, **own,
    )  # fmt: skip
    return out[..., :head_dim]


def _check(
    q: Array,
    data: Array,
    scale: Array | None,
    page_table: Array,
    kv_len: Array,
    q_len: Array,
    num_pages: int,
    softcap: float,
) -> None:
    if q.ndim != 4 or data.ndim != 5 or data.shape[1] != 2:
        raise ValueError(f"q must be [R, Q, N, H] and data [L*NP, 2, K, T, H], got {q.shape} and {data.shape}")
    rows, _, heads, head_dim = q.shape
    pool_rows, _, kv_heads, page_size, pool_dim = data.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} kv heads")
    if head_dim > pool_dim:
        raise ValueError(f"head dim {head_dim} of q is above the pool's {pool_dim}")
    if num_pages < 1 or pool_rows % num_pages:
        raise ValueError(f"{pool_rows} pool rows are no multiple of {num_pages=}")
    if page_size % 16:
        raise ValueError(f"{page_size} tokens a page must be a multiple of 16")
    if page_table.ndim != 2 or page_table.shape[0] != rows or kv_len.shape != (rows,) or q_len.shape != (rows,):
        raise ValueError(
            f"page_table {page_table.shape}, kv_len {kv_len.shape}, q_len {q_len.shape} must be [R, P], [R], [R] with R={rows}"
        )
    if any(array.dtype != jnp.int32 for array in (page_table, kv_len, q_len)):
        raise ValueError(
            f"page_table, kv_len, q_len must be int32, got {page_table.dtype}, {kv_len.dtype}, {q_len.dtype}"
        )
    check_scale(data, scale)
    if softcap < 0:
        raise ValueError(f"{softcap=} must not be negative (0 = none)")
