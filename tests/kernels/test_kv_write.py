"""A step's keys and values land in their own pages, and nothing else changes."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import IMPLEMENTATIONS, kv_write
from pallas_kernels.kv_write.narrow import narrow

EVERY_DTYPE = sorted(IMPLEMENTATIONS["kv_write"].keys() - {"native"})
NATIVE = pytest.param(
    "native",
    marks=pytest.mark.skipif(
        find_spec("llvmlite") is None, reason="native is written with llvmlite, which is not installed"
    ),
)
BACKENDS = [*EVERY_DTYPE, NATIVE]

L, NP, K, T, H, R, Q = 2, 9, 3, 16, 8, 3, 5
TABLE = np.array([[3, 1, 0, 0], [4, 5, 6, 0], [7, 8, 0, 0]], np.int32)
POSITIONS = np.array([[14, 15, 16, 17, 0], [40, 0, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
VALID = np.array([[True] * 4 + [False], [True] + [False] * 4, [False] * 5])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_valid_positions_are_written(backend: str, layer: int) -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal((L * NP, 2, K, T, H)).astype(np.float32)
    k, v = rng.standard_normal((2, R, Q, K, H)).astype(np.float32)
    want = data.copy()
    for row, i in zip(*np.nonzero(VALID), strict=True):
        page = layer * NP + TABLE[row, POSITIONS[row, i] // T]
        want[page, 0, :, POSITIONS[row, i] % T], want[page, 1, :, POSITIONS[row, i] % T] = k[row, i], v[row, i]
    write = jax.jit(partial(kv_write, num_pages=NP, backend=backend))
    got, scale = write(data, None, layer, k, v, TABLE, POSITIONS, VALID)
    assert scale is None
    got = np.array(got)
    scrap = layer * NP  # takes what is not valid
    for page in set(range(L * NP)) - {scrap}:
        np.testing.assert_array_equal(got[page], want[page])


@pytest.mark.parametrize("backend", ["xla", NATIVE])
def test_the_pool_is_written_in_place(backend: str) -> None:
    """Donated, the pool is the output: no copy of it in the program."""
    data = jnp.zeros((L * 500, 2, K, T, H), jnp.float32)
    k = jnp.zeros((R, Q, K, H), jnp.float32)

    def write(data, k, table, positions, valid):
        return kv_write(data, None, jnp.int32(1), k, k, table, positions, valid, num_pages=500, backend=backend)[0]

    compiled = jax.jit(write, donate_argnums=0).lower(data, k, TABLE, POSITIONS, VALID).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == data.nbytes
    assert analysis.temp_size_in_bytes < data.nbytes / 100


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("backend", EVERY_DTYPE)
def test_an_8_bit_pool_holds_what_was_written_to_the_nearest_step(backend: str, dtype: str) -> None:
    """Steps of a vector's own: for int8 its largest number / 127, for e4m3 a sixteenth of each number, or the smallest
    of all (2 ** -9 of 448) where that is larger."""
    rng = np.random.default_rng(1)
    data = jnp.zeros((L * NP, 2, K, 32, H), dtype)
    before = rng.standard_normal(data.shape[:-1]).astype(np.float32)
    k, v = (rng.standard_normal((2, R, Q, K, H)) * np.exp(rng.normal(0, 4, (2, R, Q, K, 1)))).astype(np.float32)
    write = jax.jit(partial(kv_write, num_pages=NP, backend=backend))
    got, scale = (np.array(new) for new in write(data, before, 1, k, v, TABLE, POSITIONS, VALID))
    for row, i in zip(*np.nonzero(VALID), strict=True):
        page, offset = NP + TABLE[row, POSITIONS[row, i] // 32], POSITIONS[row, i] % 32
        for side, new in enumerate((k, v)):
            wanted = new[row, i].astype(np.float64)
            found = got[page, side, :, offset].astype(np.float64) * scale[page, side, :, offset, None]
            largest = np.abs(wanted).max(-1, keepdims=True)
            half = largest / 254 if dtype == "int8" else np.maximum(np.abs(wanted) / 16, largest / 448 * 2**-10)
            assert (np.abs(found - wanted) <= half * 1.0001).all()
    written = {(TABLE[row, POSITIONS[row, i] // 32], POSITIONS[row, i] % 32) for row, i in np.argwhere(VALID)}
    for page, offset in np.ndindex(NP, 32):
        if page and (page, offset) not in written:
            np.testing.assert_array_equal(scale[NP + page, :, :, offset], before[NP + page, :, :, offset])
            assert not got[NP + page, :, :, offset].astype(np.float32).any()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_stays_one_in_8_bits(dtype: str, bad: float) -> None:
    """Else a broken row would go on with wrong numbers, and nobody would know."""
    x = jnp.ones((2, H)).at[0, 3].set(bad)
    values, scale = narrow(x, dtype)
    read = np.array(values, np.float32) * np.array(scale)[:, None]
    assert np.isnan(read[0]).all() and (read[1] == 1).all()
