"""Panels: float32 matrices cut into panels of a few outputs, as the CPU's native product reads them.  A pytree; stands where
an array would.

A panel holds its outputs for one input after the other, so a product walks through memory once and in order.  Nothing is
rounded and nothing is kept twice.  The same matrix of all layers is one array, of which a product is told the layer: a
program is handed a dozen arrays instead of hundreds, and each costs time at every call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from pallas_kernels.panel_matmul import panel_matmul, panel_width


@struct.dataclass
class Panels:
    """values float32 [L, P, I, W]: output o is column o % W of panel o // W; columns past the last output are zeros."""

    values: Array
    layer: Array | np.ndarray | None = (
        None  # [] int32: the matrix that is meant; None where there is but one, or all are
    )
    outputs: tuple[int, ...] = struct.field(pytree_node=False, default=())  # *O of a matrix

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    def unpacked(self) -> Array:
        """The matrix that is meant -> [*O, I]."""
        _, panels, inputs, width = self.values.shape
        rows = self.values[self._index()].transpose(0, 2, 1).reshape(panels * width, inputs)
        return rows[: math.prod(self.outputs)].reshape(*self.outputs, inputs)

    def _index(self) -> Array | np.ndarray:
        return np.zeros((), np.int32) if self.layer is None else self.layer


def pack(weights: Sequence[Array], *, input_axis: int) -> Panels:
    """The same weight [.., I, ..] float32 of every layer, with I at `input_axis`.  They are forgotten one by one when the
    caller holds none of them elsewhere: a mutable sequence is emptied."""
    weights = weights if isinstance(weights, list) else list(weights)
    shape, layers = weights[0].shape, len(weights)
    outputs = (*shape[:input_axis], *shape[input_axis + 1 :])
    cut = partial(_cut, axis=input_axis, width=panel_width())
    put = jax.jit(lambda values, weight, layer: values.at[layer].set(cut(weight)), donate_argnums=0)
    values = jnp.zeros((layers, *jax.eval_shape(cut, weights[0]).shape), jnp.float32)
    for layer in reversed(range(layers)):
        values = jax.block_until_ready(put(values, weights.pop(), np.int32(layer)))
    return Panels(values=values, outputs=outputs)


def is_panels(leaf: object) -> bool:
    return isinstance(leaf, Panels)


def holds_panels(tree) -> bool:
    return any(is_panels(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_panels))


def of_layer(tree, layer: int):
    """One layer of a tree whose other leaves are [L, ..], or of its description."""

    def view(leaf: Panels | Array | jax.ShapeDtypeStruct) -> Panels | Array | jax.ShapeDtypeStruct:
        if isinstance(leaf, Panels):
            return replace(leaf, layer=np.array(layer, np.int32))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=leaf.sharding)
        return leaf[layer]

    return jax.tree.map(view, tree, is_leaf=is_panels)


def multiply_panels(x: Array, weight: Panels) -> Array:
    """x [..., I] times weight -> [..., *O] float32."""
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    outputs = math.prod(weight.outputs)
    out = panel_matmul(rows, weight.values, weight._index(), outputs=outputs, backend="native")
    return out.reshape(*x.shape[:-1], *weight.outputs)


def take_columns(weight: Panels, ids: Array) -> Array:
    """The weights of some outputs.  ids [...] int32 in [0, O), of a matrix with one output axis -> [..., I]."""
    width = weight.values.shape[-1]
    return weight.values.at[weight._index(), ids // width, :, ids % width].get(mode="clip")


def _cut(weight: Array, *, axis: int, width: int) -> Array:
    rows = jnp.moveaxis(weight, axis, -1).reshape(-1, weight.shape[axis])  # [O, I]
    panels = -(-rows.shape[0] // width)
    rows = jnp.pad(rows, ((0, panels * width - rows.shape[0]), (0, 0)))
    return rows.reshape(panels, width, -1).transpose(0, 2, 1)
