"""What must not change a row's bits: its mates, the page size, where its pages lie.  And the edges of the contracts:
padded head dims, refusals."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import IMPLEMENTATIONS, implementation, kv_write, paged_attention
from tests.kernels.cases import NOT_RUN

HEADS, KV_HEADS, HEAD_DIM, LENGTH, MAX_LEN = 9, 3, 64, 333, 640


def attend_first_row(
    lengths: list[int],
    *,
    queries: int,
    page_size: int = 64,
    window: int = 0,
    seed: int = 0,
    pad: int = 0,
    backend: str = "xla",
) -> np.ndarray:
    """Row 0 holds the same sequence whatever `seed`; its mates, its pages and the NaN around them differ."""
    same, other = np.random.default_rng(1), np.random.default_rng(seed)
    rows, columns = len(lengths), MAX_LEN // page_size
    num_pages = 1 + rows * columns
    table = (1 + other.permutation(rows * columns)).reshape(rows, columns).astype(np.int32)
    data = np.full((num_pages, 2, KV_HEADS, page_size, HEAD_DIM + pad), np.nan, np.float32)
    q = other.standard_normal((rows, queries, HEADS, HEAD_DIM)).astype(np.float32)
    q[0] = same.standard_normal(q.shape[1:])
    for row, length in enumerate(lengths):
        kv = (other if row else same).standard_normal((MAX_LEN, 2, KV_HEADS, HEAD_DIM))
        for at in range(length):
            data[table[row, at // page_size], :, :, at % page_size] = np.pad(kv[at], ((0, 0), (0, 0), (0, pad)))
    kv_len = np.array(lengths, np.int32)
    attend = partial(
        paged_attention, num_pages=num_pages, scale_factor=0.125, window=window, softcap=0.0, backend=backend
    )
    out = jax.jit(attend)(q, data, None, 0, table, kv_len, np.minimum(kv_len, queries))
    return np.asarray(out)[0]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("backend", ["xla", "native"])
def test_mates_page_size_and_page_ids_change_no_bit(backend: str, queries: int, window: int) -> None:
    """One compiled shape per page size: the bits are equal, not merely close."""
    if reason := NOT_RUN.get(backend, {}).get("any"):
        pytest.skip(reason)
    run = partial(attend_first_row, queries=queries, window=window, backend=backend)
    want = run([LENGTH] + [40] * 7)
    for seed, mates in enumerate(([600] * 7, [0] * 7, [600, 0, 50, 334, 333, 100, 590]), 2):
        np.testing.assert_array_equal(run([LENGTH, *mates], seed=seed), want)
    for page_size in (16, 32, 128):
        np.testing.assert_array_equal(run([LENGTH] + [500] * 7, page_size=page_size, seed=9), want)


@pytest.mark.parametrize("backend", ["xla", "native"])
def test_a_padded_head_dim_of_the_pool_changes_nothing(backend: str) -> None:
    if reason := NOT_RUN.get(backend, {}).get("any"):
        pytest.skip(reason)
    run = partial(attend_first_row, [LENGTH, 70], queries=1, backend=backend)
    np.testing.assert_allclose(run(pad=64), run(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", sorted(IMPLEMENTATIONS["kv_write"]))
def test_kv_write_pads_the_head_dim_with_zeros_and_takes_any_invalid_position(backend: str) -> None:
    data = np.full((3, 2, 1, 16, 12), np.nan, np.float32)
    k, v = np.ones((1, 2, 1, 8), np.float32), np.full((1, 2, 1, 8), 2, np.float32)
    table, positions = np.array([[2]], np.int32), np.array([[3, 2_000_000_000]], np.int32)
    write = jax.jit(partial(kv_write, num_pages=3, backend=backend))
    got = np.asarray(write(data, None, 0, k, v, table, positions, np.array([[True, False]]))[0])
    np.testing.assert_array_equal(got[2, :, 0, 3], [[1] * 8 + [0] * 4, [2] * 8 + [0] * 4])
    assert np.isnan(got[1]).all()
    assert np.isnan(np.delete(got[2], 3, axis=2)).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": jnp.zeros((1, 2, 3, 8))}, "k and v"),
        ({"data": jnp.zeros((3, 2, 2, 16, 8))}, "does not fit"),
        ({"num_pages": 2}, "num_pages=2"),
        ({"data": jnp.zeros((3, 2, 1, 16, 8), jnp.int8)}, "needs scale"),
        ({"scale": jnp.zeros((3, 2, 1, 16))}, "takes no scale"),
        ({"data": jnp.zeros((3, 2, 1, 16, 8), jnp.int8), "scale": jnp.zeros((3, 2, 1, 8))}, "must be"),
        ({"positions": jnp.zeros((1, 3), jnp.int32)}, "positions"),
        ({"valid": jnp.zeros((1, 2), jnp.int32)}, "bool"),
        ({"backend": "cuda"}, "xla"),
    ],
)
def test_kv_write_refuses_what_it_says_it_refuses(change: dict, words: str) -> None:
    given = {
        "data": jnp.zeros((3, 2, 1, 16, 8)), "scale": None, "layer": 0, "k": jnp.zeros((1, 2, 1, 8)), "v": jnp.zeros((1, 2, 1, 8)),
        "page_table": jnp.zeros((1, 1), jnp.int32), "positions": jnp.zeros((1, 2), jnp.int32),
        "valid": jnp.zeros((1, 2), bool), "num_pages": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        kv_write(**(given | change))


def test_an_unknown_operation_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="kv_write"):
        implementation("softmax", "xla")
