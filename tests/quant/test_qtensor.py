"""Weights in few bits against float64: how far a number and a product may be off, and that nothing is lost on the way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.quant import matmul, take_rows
from jaxserve.quant.qtensor import QTensor, multiply, multiply_wide, quantise

LARGEST = {8: 127, 4: 7}
BITS = pytest.mark.parametrize("bits", [8, 4])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def wide(weight: QTensor) -> np.ndarray:
    return np.asarray(weight.unpacked(), np.float64) * np.asarray(weight.scale, np.float64)[..., None]


@BITS
def test_every_number_is_off_by_half_a_scale_at_the_most(bits: int) -> None:
    weight = normal(48, 2, 20)  # [I, 2, O]
    weight[:, 1, 3] = 0
    made = quantise(jnp.asarray(weight), bits, input_axis=0)
    assert made.unpacked().shape == (2, 20, 48) and made.values.nbytes == weight.size * bits // 8
    assert np.abs(made.unpacked()).max() == LARGEST[bits]
    exact = np.moveaxis(weight.astype(np.float64), 0, -1)
    scale = np.abs(exact).max(-1) / LARGEST[bits]
    np.testing.assert_allclose(np.asarray(made.scale)[scale > 0], scale[scale > 0], rtol=1e-6)
    off = np.abs(wide(made) - exact)
    assert (off <= 0.5001 * np.asarray(made.scale)[..., None]).all()


@BITS
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 5), ()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_the_float64_one_of_what_was_kept(bits: int, rows: tuple[int, ...], dtype: str) -> None:
    weight = quantise(jnp.asarray(normal(64, 2, 24), dtype), bits, input_axis=0)
    x = normal(*rows, 64, seed=1)
    out = jax.jit(multiply)(jnp.asarray(x, dtype), weight)
    exact = np.einsum("...i,cfi->...cf", np.asarray(jnp.asarray(x, dtype), np.float64), wide(weight))
    assert out.dtype == jnp.float32 and out.shape == exact.shape
    # On CPU x is rounded too: by half of its row's scale, in each of 64 terms; the errors are independent.
    step = np.abs(x).max(-1) / 127 if rows else np.abs(x).max() / 127
    bound = 5 * np.asarray(step)[..., None, None] / np.sqrt(12) * np.sqrt((wide(weight) ** 2).sum(-1))
    assert (np.abs(np.asarray(out) - exact) <= bound + 1e-4).all()


@BITS
def test_what_other_platforms_run_is_exact_to_rounding(bits: int) -> None:
    weight, x = quantise(jnp.asarray(normal(64, 24)), bits, input_axis=0), normal(3, 64, seed=1)
    np.testing.assert_allclose(multiply_wide(jnp.asarray(x), weight), x @ wide(weight).T, rtol=1e-4, atol=1e-4)


@BITS
def test_an_embedding_gives_its_rows_and_is_its_own_head(bits: int) -> None:
    table = normal(40, 16)
    made = quantise(jnp.asarray(table), bits, input_axis=1)
    ids = jnp.array([[3, 39], [0, 7]])
    np.testing.assert_allclose(take_rows(nnx.Param(made), ids), wide(made)[np.asarray(ids)], rtol=1e-6)
    x = normal(2, 16, seed=2)
    logits = matmul(jnp.asarray(x), nnx.Param(made), is_transposed=True)
    np.testing.assert_allclose(logits, x @ wide(made).T, atol=0.1)


@BITS
def test_a_described_weight_becomes_what_the_weight_becomes(bits: int) -> None:
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(normal(16, 2, 8), NamedSharding(mesh, PartitionSpec(None, None, "tp")))
    made = quantise(placed, bits, input_axis=0)
    described = quantise(jax.ShapeDtypeStruct(placed.shape, placed.dtype, sharding=placed.sharding), bits, input_axis=0)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(described), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert made.values.sharding.shard_shape(made.values.shape) == (2, 4, 16 * bits // 8)


def test_four_bits_need_an_even_number_of_inputs() -> None:
    with pytest.raises(ValueError, match="5 inputs cannot be packed"):
        quantise(jnp.zeros((5, 4)), 4, input_axis=0)
