"""The quantised matmul as a Pallas kernel of the Triton backend, for NVIDIA GPUs.

A program owns a tile of outputs and walks its share of the groups.  For each it loads the group's values as they lie in
memory (4 or 8 bits), widens them in registers, dots, and scales the float32 product: no weight ever stands wide in
memory, and no scale is rounded into a weight.  A decode step has too few output tiles to fill the chip, so its groups
are split over several programs whose partial sums are added afterwards.

Every int4 and int8 value is exact in bfloat16, and a float32 x is the exact sum of three bfloat16 terms (8 + 8 + 8 bits
of mantissa): all dots run on the tensor cores and lose nothing but the accumulator's rounding.

The compiler's own packing of `jnp.int4` is what the kernel reads (two neighbours along O in a byte, the even one low)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.tiles import Tiles

DECODE_ROWS = 64  # up to so many rows of x a step is bound by reading the weight
FILLED = 264  # programs that keep an H200's 132 multiprocessors busy, two on each
MIN_COLUMNS = 32  # outputs a program: 16 bytes of int4 a row, what one thread loads at once


def quant_matmul(
    x: Array, values: Array, scales: Array, *, tiles: Tiles | None = None, interpret: bool = False
) -> Array:
    """x [M, I], values [I, O], scales [I // B, O] -> [M, O] float32.  See the package's `quant_matmul`.

    tiles: rows and columns of a program's output tile, splits of the groups, num_warps, num_stages."""
    (rows, inputs), (groups, outputs) = x.shape, scales.shape
    if outputs % MIN_COLUMNS:
        raise ValueError(f"{outputs} outputs are no multiple of {MIN_COLUMNS}: pad the weight or choose backend='xla'")
    tile = _default_tiles(x, scales) | dict(tiles or {})
    columns = min(tile["columns"], outputs & -outputs)  # no more than the power of two in O: no tile is ragged
    splits = min(tile["splits"], groups)
    sums = pl.pallas_call(
        partial(_kernel, rows=tile["rows"], groups=pl.cdiv(groups, splits)),
        grid=(pl.cdiv(rows, tile["rows"]), outputs // columns, splits),
        in_specs=[
            pl.BlockSpec((rows, inputs), lambda m, o, s: (0, 0)),
            pl.BlockSpec((inputs, columns), lambda m, o, s: (0, o)),
            pl.BlockSpec((groups, columns), lambda m, o, s: (0, o)),
        ],
        out_specs=pl.BlockSpec((None, rows, columns), lambda m, o, s: (s, 0, o)),
        out_shape=jax.ShapeDtypeStruct((splits, rows, outputs), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile["num_warps"], num_stages=tile["num_stages"]),
        interpret=interpret,
        name="quant_matmul",
    )(x, values, scales)
    return sums[0] if splits == 1 else sums.sum(0)


def _default_tiles(x: Array, scales: Array) -> dict[str, int]:
    """Chosen by what the compiler reports for an H200 (no spilled register, two programs a multiprocessor), not timed."""
    (rows, inputs), (groups, outputs) = x.shape, scales.shape
    columns = 64 if x.dtype == jnp.float32 else 128  # three terms of x in flight take twice the registers
    if rows > DECODE_ROWS:
        return {"rows": 128, "columns": columns, "splits": 1, "num_warps": 8, "num_stages": 3}
    group = inputs // groups
    if rows <= 16 and group < 128:
        columns *= 2  # a step of fewer than 16k values makes ptxas trade registers for occupancy, and spill
    return {
        "rows": 16 if rows <= 16 else 64,  # mma.sync or wgmma
        "columns": columns,
        "splits": max(1, min(groups // 4, FILLED * columns // outputs)),
        "num_warps": 4,
        "num_stages": min(6, 512 // group),  # the smaller a group, the more of them must be on their way
    }


def _kernel(x_ref, values_ref, scales_ref, out_ref, *, rows: int, groups: int):
    """One tile of one split.  rows: of the tile; groups: of the split.

    x_ref [M, I]; values_ref [I, C] and scales_ref [I // B, C] of the tile's C columns; out_ref [M, C] of the split."""
    num_groups, columns = scales_ref.shape
    group = values_ref.shape[0] // num_groups
    row = pl.program_id(0) * rows
    first = pl.program_id(2) * groups
    is_row = (row + jnp.arange(rows) < x_ref.shape[0])[:, None]

    def add_group(g: Array, total: Array) -> Array:
        at = pl.ds(g * group, group)
        x = plt.load(x_ref.at[pl.ds(row, rows), at], mask=is_row, other=0)
        weight = values_ref[at, :].astype(jnp.bfloat16)
        dot = sum(_dot(term, weight) for term in _bfloat16_terms(x))
        return total + dot * scales_ref[g, :].astype(jnp.float32)[None, :]

    total = jnp.zeros((rows, columns), jnp.float32)
    total = lax.fori_loop(first, jnp.minimum(first + groups, num_groups), add_group, total)
    plt.store(out_ref.at[pl.ds(row, rows), :], total, mask=is_row)


def _bfloat16_terms(x: Array) -> list[Array]:
    """Terms that sum to x exactly, the largest first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    terms = []
    for _ in range(3):
        terms.append(x.astype(jnp.bfloat16))
        x = x - terms[-1].astype(jnp.float32)
    return terms


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
