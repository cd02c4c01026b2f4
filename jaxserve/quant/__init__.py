"""The one door between activations and weight matrices: every weight is read here and nowhere else.

A weight is an array today; a quantised one becomes another branch here, and no model changes."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax


def matmul(x: Array, weight: nnx.Variable, *, is_transposed: bool = False) -> Array:
    """x [..., I] times weight [I, *O] (transposed: [O, I]) -> [..., *O] float32, accumulated in float32."""
    w = weight.get_value()
    contract = w.ndim - 1 if is_transposed else 0
    return lax.dot_general(
        x.astype(w.dtype),
        w,
        (((x.ndim - 1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if w.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def take_rows(weight: nnx.Variable, ids: Array) -> Array:
    """Rows of an embedding [V, D].  ids: [...] int32 in [0, V) -> [..., D]."""
    return weight.get_value().at[ids].get(mode="clip")
