"""Activations times a float32 weight cut into panels: the contract and its checks.

Letters: M rows of activations, I inputs, O outputs, L layers, P panels of W outputs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.registry import implementation


def panel_width() -> int:
    """W as the native product wants it on this CPU."""
    from pallas_kernels.panel_matmul.native import panel_width

    return panel_width()


def panel_matmul(x: Array, panels: Array, layer: Array | np.ndarray | int, *, outputs: int, backend: str) -> Array:
    """x [M, I] float32 times one layer of panels [L, P, I, W] float32 -> [M, outputs] float32.

    out[m, o] = sum_i x[m, i] * panels[layer, o // W, i, o % W]; P = outputs / W, rounded up.  layer: int32 scalar in
    [0, L), traced or not.  A row's result has the same bits whatever its mates.  Raises ValueError with the shapes it
    cannot serve."""
    if x.ndim != 2 or panels.ndim != 4 or x.shape[1] != panels.shape[2]:
        raise ValueError(f"x and panels must be [M, I] and [L, P, I, W], got {x.shape} and {panels.shape}")
    _, count, _, width = panels.shape
    if -(-outputs // width) != count:
        raise ValueError(f"{count} panels of {width} do not hold {outputs=}")
    if x.dtype != jnp.float32 or panels.dtype != jnp.float32:
        raise ValueError(f"x and panels must be float32, got {x.dtype} and {panels.dtype}")
    return implementation("panel_matmul", backend)(x, panels, jnp.asarray(layer, jnp.int32), outputs=outputs)
