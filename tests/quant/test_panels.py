"""Weights in panels: the same matrix, whoever asks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("llvmlite", reason="the native kernels are written with llvmlite, which is not installed")

from jaxserve.quant import matmul, take_rows
from jaxserve.quant.panels import Panels, holds_panels, of_layer, pack
from jaxserve.quant.qtensor import quantise


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(("shape", "axis"), [((64, 100), 0), ((100, 64), 1), ((64, 2, 24), 0)])
def test_a_packed_matrix_comes_back_with_its_inputs_last(shape: tuple[int, ...], axis: int) -> None:
    weight = normal(*shape)
    packed = pack([weight], input_axis=axis)
    assert (packed.unpacked() == jnp.moveaxis(weight, axis, -1)).all()


@pytest.mark.parametrize(("shape", "axis"), [((64, 100), 0), ((100, 64), 1), ((64, 2, 24), 0)])
def test_products_are_those_of_the_array(shape: tuple[int, ...], axis: int) -> None:
    weight, x = normal(*shape), normal(3, 2, 64)
    got = matmul(x, nnx.Param(pack([weight], input_axis=axis)), is_transposed=axis == 1)
    wanted = matmul(x, nnx.Param(weight), is_transposed=axis == 1)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


def test_rows_of_an_embedding_are_the_arrays() -> None:
    table, ids = normal(500, 64), jnp.asarray([[0, 1, 47], [48, 499, 250]], jnp.int32)
    assert (take_rows(nnx.Param(pack([table], input_axis=1)), ids) == table[ids]).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_from_panels_as_from_the_array(bits: int) -> None:
    weight = normal(64, 2, 24)
    packed = pack([weight], input_axis=0)
    got, wanted = quantise(packed, bits, input_axis=0), quantise(weight, bits, input_axis=0)
    assert (got.values == wanted.values).all()
    assert (got.scale == wanted.scale).all()
    described = quantise(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), packed),
        bits,
        input_axis=0,
    )
    assert jax.tree.map(lambda leaf: leaf.shape, described) == jax.tree.map(lambda leaf: leaf.shape, wanted)


def test_four_bits_of_an_odd_number_of_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="5 inputs cannot be packed"):
        quantise(pack([normal(5, 4)], input_axis=0), 4, input_axis=0)


def test_packing_knows_its_dtype() -> None:
    packed = pack([normal(64, 100)], input_axis=0)
    assert isinstance(packed, Panels)
    assert packed.dtype == jnp.float32


def test_a_layer_of_many_is_found_by_its_number() -> None:
    layers = [normal(64, 100) * scale for scale in (1, 2, 3)]
    tree = {"down": pack(list(layers), input_axis=0), "norm": jnp.arange(3.0)}
    assert holds_panels(tree)
    for number, layer in enumerate(layers):
        view = of_layer(tree, number)
        assert (view["down"].unpacked() == layer.T).all()
        assert view["norm"] == number
        product = jax.jit(lambda x, w: matmul(x, nnx.Param(w)))(jnp.ones((1, 64)), view["down"])
        np.testing.assert_allclose(product[0], layer.sum(0), rtol=0, atol=1e-4)
