"""A step's keys and values land in their own pages, and nothing else changes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import IMPLEMENTATIONS, kv_write

L, NP, K, T, H, R, Q = 2, 9, 3, 16, 8, 3, 5
TABLE = np.array([[3, 1, 0, 0], [4, 5, 6, 0], [7, 8, 0, 0]], np.int32)
POSITIONS = np.array([[14, 15, 16, 17, 0], [40, 0, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
VALID = np.array([[True] * 4 + [False], [True] + [False] * 4, [False] * 5])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("backend", sorted(IMPLEMENTATIONS["kv_write"]))
def test_only_the_valid_positions_are_written(backend: str, layer: int) -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal((L * NP, 2, K, T, H)).astype(np.float32)
    k, v = rng.standard_normal((2, R, Q, K, H)).astype(np.float32)
    want = data.copy()
    for row, i in zip(*np.nonzero(VALID), strict=True):
        page = layer * NP + TABLE[row, POSITIONS[row, i] // T]
        want[page, 0, :, POSITIONS[row, i] % T], want[page, 1, :, POSITIONS[row, i] % T] = k[row, i], v[row, i]
    got = np.array(
        jax.jit(partial(kv_write, num_pages=NP, backend=backend))(data, layer, k, v, TABLE, POSITIONS, VALID)
    )
    scrap = layer * NP  # takes what is not valid
    for page in set(range(L * NP)) - {scrap}:
        np.testing.assert_array_equal(got[page], want[page])


def test_the_pool_is_written_in_place() -> None:
    """Donated, the pool is the output: no copy of it in the program."""
    data = jnp.zeros((L * 500, 2, K, T, H), jnp.float32)
    k = jnp.zeros((R, Q, K, H), jnp.float32)

    def write(data, k, table, positions, valid):
        return kv_write(data, jnp.int32(1), k, k, table, positions, valid, num_pages=500)

    compiled = jax.jit(write, donate_argnums=0).lower(data, k, TABLE, POSITIONS, VALID).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == data.nbytes
    assert analysis.temp_size_in_bytes < data.nbytes / 100
