"""The quantised matmuls of an 8B model's MLP, as programs for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import quant_matmul

SIDES = {"up": (4096, 14336), "down": (14336, 4096)}  # inputs, outputs


def program(name: str) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """ "up-int4-128-bfloat16-16": side, values, group, x's dtype, rows."""
    side, values, group, x, rows = name.split("-")
    inputs, outputs = SIDES[side]
    shapes = [
        jax.ShapeDtypeStruct((int(rows), inputs), jnp.dtype(x)),
        jax.ShapeDtypeStruct((inputs, outputs), jnp.dtype(values)),
        jax.ShapeDtypeStruct((inputs // int(group), outputs), jnp.float32),
    ]
    return partial(quant_matmul, backend="pallas_triton"), shapes
