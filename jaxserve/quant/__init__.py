"""The one door between activations and weight matrices: every weight is read here and nowhere else.

A weight is an array, Panels (`jaxserve.quant.panels`) or a QTensor (`jaxserve.quant.qtensor`); no model knows which."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxserve.quant.panels import Panels, multiply_panels, take_columns
from jaxserve.quant.qtensor import QTensor, multiply


def matmul(x: Array, weight: nnx.Variable, *, is_transposed: bool = False) -> Array:
    """x [..., I] times weight [I, *O] (transposed: [O, I]) -> [..., *O] float32, accumulated in float32."""
    w = weight.get_value()
    if isinstance(w, QTensor):
        return multiply(x, w)
    if isinstance(w, Panels):
        return multiply_panels(x, w)
    x = x.astype(w.dtype)
    if not is_transposed:
        return _dot(x, w, ((x.ndim - 1,), (0,)))
    many = x.ndim > 1 and x.size > x.shape[-1]
    if not many or w.shape[0] % 2:
        return _transposed(x, w)
    return lax.platform_dependent(x, w, cpu=_transposed_on_cpu, default=_transposed)


def take_rows(weight: nnx.Variable, ids: Array) -> Array:
    """Rows of an embedding [V, D].  ids: [...] int32 in [0, V) -> [..., D]."""
    w = weight.get_value()
    if isinstance(w, Panels):
        return take_columns(w, ids)
    if not isinstance(w, QTensor):
        return w.at[ids].get(mode="clip")
    rows = replace(w, values=w.values.at[ids].get(mode="clip"), scale=w.scale.at[ids].get(mode="clip"))
    return (rows.unpacked().astype(jnp.float32) * rows.scale[..., None]).astype(w.dtype)


def _transposed(x: Array, w: Array) -> Array:
    """x [..., I], w [O, I] -> [..., O]."""
    return _dot(x, w, ((x.ndim - 1,), (1,)))


def _transposed_on_cpu(x: Array, w: Array) -> Array:
    """The same, two halves of the rows side by side: XLA's CPU backend packs the right operand at every call, and here
    that is x (2 to 32 rows of a 49,152 x 576 head: 2.7 to 6.5 ms instead of 4.2 to 8)."""
    rows = x.reshape(-1, x.shape[-1])
    halves = w.reshape(2, w.shape[0] // 2, w.shape[1])
    both = jnp.broadcast_to(rows, (2, *rows.shape))
    out = _dot(halves, both, ((2,), (2,)), batch=((0,), (0,)))  # [2, O / 2, rows]
    return out.reshape(w.shape[0], -1).T.reshape(*x.shape[:-1], w.shape[0])


def _dot(x: Array, w: Array, contract: tuple, batch: tuple = ((), ())) -> Array:
    """float32, whatever the operands: at the highest precision when they are float32."""
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, w, (contract, batch), precision=precision, preferred_element_type=jnp.float32)
