"""Where arrays live: the mesh, and the map from logical axes to it.  Nothing here computes.

One mesh axis, `tp`: query and kv heads, mlp width and vocabulary are split over it, everything else is on every device.
With one device all of it means nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import Device
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tp"

# Logical axis of a weight -> mesh axis.  None: whole on every device.
LOGICAL_AXES: dict[str, str | None] = {
    "heads": TENSOR_AXIS,  # q, k, v of a kv head and its group stand together
    "mlp": TENSOR_AXIS,
    "vocab": TENSOR_AXIS,
    "embed": None,
    "layers": None,
}


def make_mesh(
    devices: Sequence[Device],  # pyright: ignore[reportInvalidTypeForm]  (jax exports it as a variable)
    tensor_parallel: int,
) -> Mesh:
    """The first `tensor_parallel` devices as a mesh.  Raises ValueError when there are fewer."""
    if not 1 <= tensor_parallel <= len(devices):
        raise ValueError(
            f"tensor_parallel={tensor_parallel} must be between 1 and the {len(devices)} devices there are"
        )
    return Mesh(np.array(devices[:tensor_parallel]), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def kv_heads_per_mesh(*, heads: int, kv_heads: int, tensor_parallel: int) -> int:
    """K after repeating kv heads, so that every device holds whole ones.  Raises ValueError with the numbers."""
    if heads % tensor_parallel:
        raise ValueError(f"N={heads} query heads do not divide by tensor_parallel={tensor_parallel}")
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise ValueError(
            f"K={kv_heads} kv heads fit tensor_parallel={tensor_parallel} neither way:"
            " one must be a multiple of the other"
        )
    return max(kv_heads, tensor_parallel)


def weight_sharding(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """Where a weight with these logical axes (None: no name) lives.

    A vocabulary that does not divide stays whole: it is the one axis whose size no config can choose.
    """
    names = [LOGICAL_AXES[axis] if axis else None for axis in axes]
    for i, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        if axis == "vocab" and size % mesh.shape[TENSOR_AXIS]:
            names[i] = None
    return NamedSharding(mesh, PartitionSpec(*names))


def weight_format(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> Format | NamedSharding:
    """Where a weight lives and, on TPU, in which order its dims lie in memory there: unnamed axes outside of the matrix.

    Gate and up [D, 2, F] are then two matrices.  As written, a tile would hold two rows, and by its compiler's estimate
    the load of that weight takes ten times as long (three quarters of a step of Llama 3 8B on four v6e)."""
    sharding = weight_sharding(mesh, shape, axes)
    order = tuple(sorted(range(len(axes)), key=lambda i: (axes[i] != "layers", axes[i] is not None)))
    if mesh.devices.flat[0].platform != "tpu" or order == tuple(range(len(axes))):
        return sharding
    return Format(Layout(order), sharding)


def local_bytes(tree) -> int:
    """Of all arrays of a tree, or their descriptions, on one device."""
    return sum(_local_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _local_bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def abstract(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shape, dtype, place and order of dims, for a program that will be handed the array."""
    layout = array.format.layout  # pyright: ignore[reportAttributeAccessIssue]  (its stub of Array lacks it)
    where = array.sharding
    if isinstance(layout, Layout) and layout.major_to_minor != tuple(range(array.ndim)):
        where = Format(Layout(layout.major_to_minor), where)  # without the tiles: they are the compiler's to choose
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)
