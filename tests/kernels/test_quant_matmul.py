"""The group-wise quantised matmul: every backend against a float64 oracle, the kernel's body interpreted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from pallas_kernels import IMPLEMENTATIONS, quant_matmul
from pallas_kernels.tiles import Tiles

BACKENDS = sorted(IMPLEMENTATIONS["quant_matmul"])
SMALLEST = {"int4": -8, "int8": -128}


@cache
def _program(backend: str, tiles: tuple[tuple[str, int], ...]) -> Callable[..., Array]:
    is_kernel = backend.startswith("pallas")
    return jax.jit(partial(quant_matmul, backend=backend, tiles=dict(tiles) or None, interpret=is_kernel))


class Case:
    """Random operands, the smallest and the largest value among them."""

    def __init__(
        self, *, rows: int, group: int, values: str, x: str = "float32", scales: str = "float32",
        inputs: int = 256, outputs: int = 96,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(0)
        self.group = group
        self.values = rng.integers(SMALLEST[values], -SMALLEST[values], (inputs, outputs))
        self.values[0, :2] = SMALLEST[values], -SMALLEST[values] - 1
        self.x = jnp.asarray(rng.standard_normal((rows, inputs)), x)
        self.scales = jnp.asarray(rng.uniform(0.001, 0.1, (inputs // group, outputs)), scales)
        self.dtype = values

    def run(self, backend: str, tiles: Tiles | None = None) -> np.ndarray:
        run = _program(backend, tuple((tiles or {}).items()))
        return np.asarray(run(self.x, jnp.asarray(self.values, self.dtype), self.scales))

    def oracle(self) -> tuple[np.ndarray, np.ndarray]:
        """The product in float64, and how far each element may be from it: a few float32 roundings of what it sums."""
        x = np.asarray(self.x.astype(jnp.float32), np.float64)
        weight = self.values * np.repeat(np.asarray(self.scales.astype(jnp.float32), np.float64), self.group, axis=0)
        return x @ weight, 4e-7 * (np.abs(x) @ np.abs(weight))

    def assert_right(self, got: np.ndarray) -> None:
        want, tolerance = self.oracle()
        assert got.dtype == np.float32 and got.shape == want.shape
        assert (np.abs(got - want) <= tolerance).all(), np.max(np.abs(got - want) / tolerance)


@pytest.mark.parametrize(
    ("group", "values", "x", "scales"),
    [
        (32, "int4", "float32", "float32"),
        (64, "int4", "bfloat16", "bfloat16"),
        (128, "int4", "bfloat16", "float32"),
        (32, "int8", "bfloat16", "float32"),
        (64, "int8", "float32", "bfloat16"),
        (128, "int8", "float32", "float32"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_product_equals_the_oracle(backend: str, group: int, values: str, x: str, scales: str) -> None:
    """To float32 rounding in every dtype: a bfloat16 x and a quantised weight are exact numbers."""
    case = Case(rows=5, group=group, values=values, x=x, scales=scales)
    case.assert_right(case.run(backend))


@pytest.mark.parametrize("rows", [1, 16, 17, 65, 150])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_rows(backend: str, rows: int) -> None:
    """Below, at and above the kernel's tiles, decode's and prefill's."""
    case = Case(rows=rows, group=64, values="int4", x="bfloat16", inputs=128, outputs=64)
    case.assert_right(case.run(backend))


@pytest.mark.parametrize(
    "tiles", [{"rows": 32, "columns": 32}, {"splits": 1}, {"splits": 5}, {"splits": 100}, {"columns": 1024}]
)
def test_block_sizes_never_change_the_meaning(tiles: Tiles) -> None:
    """Not dividing the rows, the outputs or the groups either."""
    case = Case(rows=37, group=32, values="int8")
    case.assert_right(case.run("pallas_triton", tiles))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_serves_its_own_group_alone(backend: str) -> None:
    """NaN in one group's scale of one output: that output is NaN, and no other."""
    case = Case(rows=3, group=32, values="int4")
    want = case.run(backend)
    case.scales = case.scales.at[2, 50].set(jnp.nan)
    got = case.run(backend)
    assert np.isnan(got[:, 50]).all()
    np.testing.assert_array_equal(np.delete(got, 50, axis=1), np.delete(want, 50, axis=1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.zeros((2, 3, 64))}, r"\[M, I\]"),
        ({"x": jnp.zeros((2, 128))}, r"\(2, 128\)"),
        ({"scales": jnp.zeros((4, 32))}, "no groups of"),
        ({"scales": jnp.zeros((1, 64))}, "no groups of"),
        ({"x": jnp.zeros((2, 64), jnp.float16)}, "float16"),
        ({"scales": jnp.zeros((1, 32), jnp.float16)}, "float16"),
        ({"values": jnp.zeros((64, 32), jnp.uint8)}, "uint8"),
        ({"backend": "cuda"}, "xla"),
    ],
)
def test_refuses_what_it_says_it_refuses(change: dict, words: str) -> None:
    given = {
        "x": jnp.zeros((2, 64)), "values": jnp.zeros((64, 32), jnp.int8), "scales": jnp.zeros((1, 32)), "backend": "xla",
    }  # fmt: skip
    quant_matmul(**given)
    with pytest.raises(ValueError, match=words):
        quant_matmul(**(given | change))


def test_the_kernel_refuses_outputs_it_would_have_to_pad() -> None:
    given = {"x": jnp.zeros((2, 64)), "values": jnp.zeros((64, 48), jnp.int4), "scales": jnp.zeros((1, 48))}
    with pytest.raises(ValueError, match=r"48 outputs are no multiple of 32.*xla"):
        quant_matmul(**given, backend="pallas_triton", interpret=True)
