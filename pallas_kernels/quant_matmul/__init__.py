"""Activations times a weight quantised in groups along its input dimension: the contract and its checks.

Letters: M rows of activations, I inputs, O outputs, B inputs a group.  One scale per output (per-channel) needs no
kernel: XLA fuses a scale that comes after the whole dot."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.registry import implementation
from pallas_kernels.tiles import Tiles

GROUPS = (32, 64, 128)


def quant_matmul(
    x: Array, values: Array, scales: Array, *, backend: str, tiles: Tiles | None = None, interpret: bool = False
) -> Array:
    """x [M, I] float32 or bfloat16 times values [I, O] int4 or int8 with scales [I // B, O] -> [M, O] float32.

    out[m, o] = sum_i x[m, i] * values[i, o] * scales[i // B, o], accumulated in float32; B is I over the scales' first
    dimension, one of 32, 64, 128.  scales: float32 or bfloat16.  int4 is `jnp.int4`: two values a byte on a GPU, by the
    compiler's own packing.

    tiles: block sizes of a kernel that has some (`pallas_kernels.tiles`), None = its defaults; they may change the last
    bits, never the meaning.  interpret: run a Pallas kernel's body as plain XLA, to try it where its chip is not.
    Raises ValueError with the shapes it cannot serve."""
    _check(x, values, scales)
    own = ({} if tiles is None else {"tiles": tiles}) | ({"interpret": True} if interpret else {})
    return implementation("quant_matmul", backend)(x, values, scales, **own)


def _check(x: Array, values: Array, scales: Array) -> None:
    if x.ndim != 2 or values.ndim != 2 or scales.ndim != 2 or x.shape[1] != values.shape[0]:
        raise ValueError(
            f"x, values, scales must be [M, I], [I, O], [I // group, O], got {x.shape}, {values.shape}, {scales.shape}"
        )
    inputs, outputs = values.shape
    if scales.shape[1] != outputs or inputs not in [scales.shape[0] * group for group in GROUPS]:
        raise ValueError(f"scales {scales.shape} give values {values.shape} no groups of {GROUPS} along their inputs")
    if x.dtype not in (jnp.float32, jnp.bfloat16) or scales.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x and scales must be float32 or bfloat16, got {x.dtype} and {scales.dtype}")
    if values.dtype not in (jnp.int4, jnp.int8):
        raise ValueError(f"values must be int4 or int8, got {values.dtype}")
