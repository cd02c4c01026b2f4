"""A layer's way to its pages: write this step's keys and values, then attend to what the pool holds.

One closure per traced step; the kernels stand in `pallas_kernels`.  Writing first means that a row's numbers depend on
no chunk border, whatever the pool's dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from jaxserve.device.state import KVPool, StepInputs
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention

Attend = Callable[..., tuple[Array, KVPool]]

HEADS = Spec(None, None, "tp", None)  # q, k, v [R, Q, heads, H]
POOL = Spec(None, None, "tp", None, None)  # data [L * NP, 2, K, T, H]


def make_attend(inputs: StepInputs, *, backend: str, mesh: Mesh) -> Attend:
    """-> attend(q [R,Q,N,H], k [R,Q,K,H], v [R,Q,K,H], pool, layer, *, window, scale, softcap) -> (out [R,Q,N,H], pool).

    `layer` and `window` are traced int32 scalars (window 0 = unlimited); heads are split over the mesh's `tp` axis."""

    def local(q, k, v, data, layer, window, page_table, kv_len, q_len, positions, *, pages, scale, softcap):
        valid = jax.lax.broadcasted_iota("int32", positions.shape, 1) < q_len[:, None]
        with jax.named_scope("kv_write"):
            data = kv_write(data, layer, k, v, page_table, positions, valid, num_pages=pages)
        with jax.named_scope("paged_attention"):
            out = paged_attention(
                q, data, None, layer, page_table, kv_len, q_len,
                num_pages=pages, scale_factor=scale, window=window, softcap=softcap, backend=backend,
            )  # fmt: skip
        return out, data

    def attend(q, k, v, pool: KVPool, layer, *, window, scale: float, softcap: float):
        body = partial(local, pages=pool.pages, scale=scale, softcap=softcap)
        if mesh.size > 1:
            specs = (HEADS, HEADS, HEADS, POOL, *(Spec(),) * 6)
            body = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(HEADS, POOL), check_vma=False)
        out, data = body(
            q, k, v, pool.data, layer, window, inputs.page_table, inputs.kv_len, inputs.q_len, inputs.positions
        )
        return out, replace(pool, data=data)

    return attend
