"""QTensor: a weight matrix in 8 or 4 bits, a scale for each of its outputs.  A pytree; stands where an array would.

Symmetric: value * scale, with value in -(2^(bits-1) - 1) .. 2^(bits-1) - 1, scale float32 and never 0.  The inputs come
last in memory whatever the weight's own order: so a dot contracts what lies side by side, and XLA's CPU backend has a
fast way for it.  Four bits are packed here, two neighbouring inputs a byte: jax's own int4 takes a byte each on CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.quant.panels import Panels

CPU_ROWS = 2  # a product of one row of 8-bit numbers takes a slow path of XLA's CPU backend


@struct.dataclass
class QTensor:
    """values int8 [*O, I], or [*O, I / 2] of 4 bits; scale float32 [*O]."""

    values: Array
    scale: Array
    bits: int = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)  # of the weight it stands for, and of the activations

    def unpacked(self) -> Array:
        """-> int8 [*O, I]."""
        if self.bits == 8:
            return self.values
        return jnp.stack(_even_and_odd(self.values), axis=-1).reshape(*self.values.shape[:-1], -1)


def quantise(weight: Array | jax.ShapeDtypeStruct | Panels, bits: int, *, input_axis: int) -> QTensor:
    """weight [.., I, ..] float32 or bfloat16 with I at `input_axis`, or in panels -> 8 or 4 bits, placed as the weight is.

    Every number is off by half a scale at the most; a scale is the output's largest magnitude over 127 or 7.  Of a
    ShapeDtypeStruct: the same, described.  Raises ValueError when 4 bits meet an odd I."""
    if isinstance(weight, Panels):
        return _quantise_panels(weight, bits)
    axis = input_axis % weight.ndim
    _check_pairs(weight.shape[axis], bits)
    make, sharding = partial(_quantise, bits=bits, axis=axis), weight.sharding
    if not isinstance(sharding, NamedSharding):
        return jax.jit(make)(weight)
    names = [*sharding.spec, *[None] * (weight.ndim - len(sharding.spec))]
    names.append(names.pop(axis))
    shapes = jax.eval_shape(make, weight)
    places = [NamedSharding(sharding.mesh, PartitionSpec(*part)) for part in (names, names[:-1])]
    where = jax.tree.unflatten(jax.tree.structure(shapes), places)
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, where)
    return jax.jit(make, out_shardings=where)(weight)


def _quantise_panels(weight: Panels, bits: int) -> QTensor:
    """Panels live on one device."""
    _check_pairs(weight.values.shape[-2], bits)

    def make(weight: Panels) -> QTensor:
        return _quantise(weight.unpacked(), bits=bits, axis=len(weight.outputs))

    if not isinstance(weight.values, jax.ShapeDtypeStruct):
        return jax.jit(make)(weight)
    where = weight.values.sharding
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), jax.eval_shape(make, weight)
    )


def _check_pairs(inputs: int, bits: int) -> None:
    if bits == 4 and inputs % 2:
        raise ValueError(f"a weight with {inputs} inputs cannot be packed two a byte")


def multiply(x: Array, weight: QTensor) -> Array:
    """x [..., I] times weight -> [..., *O] float32.

    On CPU x is quantised too, to 8 bits with a scale for each row: its dots of 8-bit integers are the only ones that
    read a weight as it is.  Elsewhere the compiler widens the values on their way into the dot."""
    return lax.platform_dependent(x, weight, cpu=multiply_integers, default=multiply_wide)


def multiply_wide(x: Array, weight: QTensor) -> Array:
    x = x.astype(weight.dtype)
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else lax.Precision.DEFAULT

    def dot(x: Array, values: Array) -> Array:
        numbers = (((x.ndim - 1,), (values.ndim - 1,)), ((), ()))
        values = values.astype(weight.dtype)
        return lax.dot_general(x, values, numbers, precision=precision, preferred_element_type=jnp.float32)

    return _sum_of_dots(dot, x, weight) * weight.scale.reshape((1,) * (x.ndim - 1) + weight.scale.shape)


def multiply_integers(x: Array, weight: QTensor) -> Array:
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    count = rows.shape[0]
    rows, scale = _round(jnp.pad(rows, ((0, max(CPU_ROWS - count, 0)), (0, 0))), 127)

    def dot(x: Array, values: Array) -> Array:
        numbers = (((1,), (values.ndim - 1,)), ((), ()))
        return lax.dot_general(x, values, numbers, preferred_element_type=jnp.int32)

    out = _sum_of_dots(dot, rows.astype(jnp.int8), weight).astype(jnp.float32)
    out = out * scale.reshape(-1, *(1,) * weight.scale.ndim) * weight.scale[None]
    return out[:count].reshape(*x.shape[:-1], *weight.scale.shape)


def _sum_of_dots(dot: Callable[[Array, Array], Array], x: Array, weight: QTensor) -> Array:
    if weight.bits == 8:
        return dot(x, weight.values)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    even, odd = _even_and_odd(weight.values)
    return dot(pairs[..., 0], even) + dot(pairs[..., 1], odd)


def _even_and_odd(packed: Array) -> tuple[Array, Array]:
    """The low four bits of each byte and the high ones, sign extended."""
    four = jnp.int8(4)
    return lax.shift_right_arithmetic(lax.shift_left(packed, four), four), lax.shift_right_arithmetic(packed, four)


def _quantise(weight: Array, *, bits: int, axis: int) -> QTensor:
    wide = jnp.moveaxis(weight.astype(jnp.float32), axis, -1)
    values, scale = _round(wide, 2 ** (bits - 1) - 1)
    values = values.astype(jnp.int8)
    if bits == 4:
        pairs = values.reshape(*values.shape[:-1], -1, 2)
        values = lax.shift_left(pairs[..., 1], jnp.int8(4)) | (pairs[..., 0] & jnp.int8(15))
    return QTensor(values=values, scale=scale, bits=bits, dtype=jnp.dtype(weight.dtype))


def _round(wide: Array, largest: int) -> tuple[Array, Array]:
    """[..., I] float32 -> whole numbers within `largest`, and the scale [...] that they were divided by."""
    scale = jnp.max(jnp.abs(wide), axis=-1) / largest
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.clip(jnp.round(wide / scale[..., None]), -largest, largest), scale
