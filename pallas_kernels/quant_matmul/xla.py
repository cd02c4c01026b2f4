"""The quantised matmul in plain XLA: a dot per group, each scaled, then their sum.

A TPU's compiler fuses all of it.  A GPU's writes the [I // B, M, O] products to memory: small in decode, not in
prefill; there `pallas_triton` is the one to choose."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def quant_matmul(x: Array, values: Array, scales: Array) -> Array:
    """x [M, I], values [I, O], scales [I // B, O] -> [M, O] float32.

    Every int4 and int8 value is exact in bfloat16, so the values take x's dtype and only the scales are left to apply."""
    groups, outputs = scales.shape
    by_group = x.reshape(x.shape[0], groups, -1)  # [M, G, B]
    weight = values.astype(x.dtype).reshape(groups, -1, outputs)  # [G, B, O]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dots = jnp.einsum("mgb,gbo->gmo", by_group, weight, precision=precision, preferred_element_type=jnp.float32)
    return jnp.sum(dots * scales.astype(jnp.float32)[:, None, :], axis=0)
