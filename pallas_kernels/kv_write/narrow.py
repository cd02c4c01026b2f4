"""Keys and values in 8 bits: one scale for each vector, so that a vector's bits depend on nothing but itself."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

SMALLEST = 1e-30  # a vector of zeros still has a scale to divide by


def narrow(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """x: [..., H] -> (values [..., H] of `dtype`, int8 or a float of 8 bits; scale [...] float32), x near values * scale.

    The largest number of a vector becomes the largest of `dtype`.  A vector with a NaN or an infinity gets a scale of
    NaN: whoever reads it sees a NaN, as in a wider pool."""
    x = x.astype(jnp.float32)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    top = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(jnp.isfinite(largest), jnp.maximum(largest, SMALLEST) / top, jnp.nan)
    values = jnp.clip(x / scale[..., None], -top, top)
    return (jnp.round(values) if is_integer else values).astype(dtype), scale
