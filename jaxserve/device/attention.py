"""A layer's way to its pages: write this step's keys and values, then attend to what the pool holds.

One closure per traced step; the kernels stand in `pallas_kernels`.  Writing first means that a row's numbers depend on
no chunk border, whatever the pool's dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from jaxserve.device.state import KVPool, ModelShape, StepInputs
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.tiles import phase_of, tiles_for

Attend = Callable[..., tuple[Array, KVPool]]

HEADS = Spec(None, None, "tp", None)  # q, k, v [R, Q, heads, H]
POOL = Spec(None, None, "tp", None, None)  # data [L * NP, 2, K, T, H']
POOL_SCALE = Spec(None, None, "tp", None)  # scale [L * NP, 2, K, T]
TPU_LANES = 128
PLATFORM_OF = {
    "native": "cpu",
    "pallas_tpu": "tpu",
    "pallas_triton": "gpu",
    "pallas_mosaic_gpu": "gpu",
}  # the others run anywhere


def pool_sharding(pool: KVPool, mesh: Mesh) -> KVPool:
    """Shardings in place of a pool's arrays: its kv heads over the mesh's `tp` axis."""
    scale = None if pool.scale is None else NamedSharding(mesh, POOL_SCALE)
    return replace(pool, data=NamedSharding(mesh, POOL), scale=scale)


def pool_head_dim(head_dim: int, mesh: Mesh) -> int:
    """H' of the pool: on TPU whole registers, because its compiler would pad a narrower pool in memory all the same, and
    copy it to do so."""
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    return -(-head_dim // TPU_LANES) * TPU_LANES if is_tpu else head_dim


def make_attend(inputs: StepInputs, *, backend: str, mesh: Mesh) -> Attend:
    """-> attend(q [R,Q,N,H], k [R,Q,K,H], v [R,Q,K,H], pool, layer, *, window, scale, softcap) -> (out [R,Q,N,H], pool).

    `layer` and `window` are traced int32 scalars (window 0 = unlimited); heads are split over the mesh's `tp` axis."""
    device_kind = mesh.devices.flat[0].device_kind
    tiles = tiles_for(device_kind, "paged_attention", backend, phase_of(inputs.positions.shape[1]))

    def local(
        q, k, v, data, narrow_scale, layer, window, page_table, kv_len, q_len, positions, *, pages, scale, softcap
    ):
        valid = jax.lax.broadcasted_iota("int32", positions.shape, 1) < q_len[:, None]
        with jax.named_scope("kv_write"):
            data, narrow_scale = kv_write(
                data, narrow_scale, layer, k, v, page_table, positions, valid, num_pages=pages,
                backend="native" if backend == "native" else "xla",
            )  # fmt: skip
        with jax.named_scope("paged_attention"):
            out = paged_attention(
                q, data, narrow_scale, layer, page_table, kv_len, q_len, num_pages=pages, scale_factor=scale,
                window=window, softcap=softcap, backend=backend, tiles=tiles,
            )  # fmt: skip
        return out, data, narrow_scale

    def attend(q, k, v, pool: KVPool, layer, *, window, scale: float, softcap: float):
        body = partial(local, pages=pool.pages, scale=scale, softcap=softcap)
        if mesh.size > 1:
            specs = (HEADS, HEADS, HEADS, POOL, POOL_SCALE, *(Spec(),) * 6)
            body = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(HEADS, POOL, POOL_SCALE), check_vma=False)
        out, data, narrow_scale = body(
            q, k, v, pool.data, pool.scale, layer, window, inputs.page_table, inputs.kv_len, inputs.q_len,
            inputs.positions,
        )  # fmt: skip
        return out, replace(pool, data=data, scale=narrow_scale)

    return attend


def why_not(
    backend: str,
    *,
    shape: ModelShape,
    softcap: float,
    dtype: str,
    kv_dtype: str,
    page_size: int,
    queries: int,
    mesh: Mesh,
) -> str | None:
    """Why this backend cannot serve such a model here, in its own words; None = it can.

    Traces one attention as a decode step and as a prefill of `queries` tokens would call it; runs and reads nothing."""
    platform = mesh.devices.flat[0].platform
    needed = PLATFORM_OF.get(backend, platform)
    if needed != platform:
        return f"{backend} runs on a {needed}, the devices here are of the platform {platform}"
    heads, kv_heads = shape.heads // mesh.size, shape.kv_heads // mesh.size
    head_dim = pool_head_dim(shape.head_dim, mesh)
    data = jax.ShapeDtypeStruct((2, 2, kv_heads, page_size, head_dim), jnp.dtype(kv_dtype))
    scale = jax.ShapeDtypeStruct(data.shape[:-1], jnp.float32) if data.dtype.itemsize == 1 else None
    scalar, row = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    table = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    try:
        for length in (1, queries):
            q = jax.ShapeDtypeStruct((1, length, heads, shape.head_dim), jnp.dtype(dtype))
            attend = partial(paged_attention, num_pages=2, scale_factor=1.0, softcap=softcap, backend=backend)
            jax.eval_shape(
                lambda q, data, scale, layer, table, kv_len, q_len, window, attend=attend: attend(
                    q, data, scale, layer, table, kv_len, q_len, window=window
                ),
                q, data, scale, scalar, table, row, row, scalar,
            )  # fmt: skip
    except (ValueError, ImportError) as error:
        return " ".join(str(error).split())
    return None
