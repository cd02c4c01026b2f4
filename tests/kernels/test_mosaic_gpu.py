"""Paged attention on Mosaic GPU, run by jax's GPU simulator: its numbers, its synchronisation, its refusals.

The simulator executes every warpgroup and every asynchronous copy on its own clock and reports a read or a write that no
barrier orders.  It came with jax 0.11; before, these tests skip."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from tests.kernels.cases import SHAPES, TOLERANCE, Case

BACKEND = "pallas_mosaic_gpu"


def assert_right_and_ordered(case: Case, tiles: Mapping[str, int] | None = None, rows: slice = slice(None)) -> None:
    got = case.run(BACKEND, tiles=tiles, rows=rows)
    np.testing.assert_allclose(got, case.oracle()[rows], rtol=0, atol=TOLERANCE["bfloat16"])
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    assert not gpu_callbacks.get_races().races_found


def test_decode_folds_the_heads_of_a_group_and_merges_its_splits() -> None:
    """Some splits get no block at all; the ring wraps around."""
    case = Case("llama3", queries=1, page_size=64, dtype="bfloat16")
    assert_right_and_ordered(case, {"splits": 2, "stages": 1}, slice(0, 3))


def test_verify_with_a_window_a_softcap_and_small_pages() -> None:
    """What a window leaves out and what follows a row are NaN, a block is four pages, and the table ends with the
    longest row's last page, within a block."""
    case = Case("gemma2", queries=4, page_size=16, dtype="bfloat16")
    case.softcap = 1.0  # the scores are a few units: 50 would bend none of them by a bfloat16's width
    case.table = case.table[:, : -(-max(case.kv_len) // 16)]
    for row, first in enumerate(case.kv_len - case.q_len - case.window + 1):
        for position in range(first):
            page = case.layer * case.num_pages + case.table[row, position // 16]
            case.data[page, :, :, position % 16] = np.nan
    assert_right_and_ordered(case)


def test_a_prompt_chunk_on_two_warpgroups() -> None:
    """Two tiles of queries share each block, two blocks share a page; some tiles have no query."""
    assert_right_and_ordered(Case("smollm2", queries=40, page_size=128, dtype="bfloat16"))


@pytest.mark.full
@pytest.mark.parametrize("queries", [1, 4, 32, 70])
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("shape", sorted(set(SHAPES) - {"mha"}))
def test_every_shape_page_size_and_number_of_queries(shape: str, page_size: int, queries: int) -> None:
    assert_right_and_ordered(Case(shape, queries=queries, page_size=page_size, dtype="bfloat16"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ("gemma2", {"stages": 1}),
        ("gemma2", {"block": 128}),
        ("gemma2", {"warpgroups": 2, "splits": 3}),
        ("gemma2", {"block": 128, "warpgroups": 2, "splits": 4}),
        ("smollm2", {"stages": 3, "splits": 3}),
        ("smollm2", {"block": 128, "stages": 5}),
        ("smollm2", {"warpgroups": 1, "splits": 2}),
    ],
)
@pytest.mark.parametrize(("queries", "page_size"), [(1, 64), (1, 32), (40, 64), (40, 32)])
def test_block_sizes_never_change_the_meaning(
    queries: int, page_size: int, shape: str, tiles: Mapping[str, int]
) -> None:
    assert_right_and_ordered(Case(shape, queries=queries, page_size=page_size, dtype="bfloat16"), tiles)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": jnp.float32}, "bfloat16 queries and pools, not float32 and bfloat16: choose pallas_triton or xla"),
        ({"pool": jnp.float32}, "bfloat16 queries and pools, not bfloat16 and float32"),
        ({"pool": jnp.int8}, "not bfloat16 and int8"),
        ({"head_dim": 32}, "head dims 64, 128, 192 and 256, not 32"),
        ({"heads": 80}, "64 query heads a kv head, not 80"),
        ({"page_size": 48}, "48 tokens a page"),
        ({"tiles": {"block": 32}}, "block of 64 or 128"),
        ({"tiles": {"stages": 0}}, "at least one"),
        ({"tiles": {"warpgroups": 3}}, "2 warpgroups"),
        ({"tiles": {"stages": 14}}, "bytes of shared memory"),
        ({"tiles": {"rows": 2}}, "rows are none of block, stages, warpgroups, splits"),
    ],
)
def test_refuses_what_it_says_it_refuses(change: dict, words: str) -> None:
    page_size, head_dim = change.get("page_size", 64), change.get("head_dim", 64)
    pool = jnp.zeros((2, 2, 1, page_size, head_dim), change.get("pool", jnp.bfloat16))
    with pytest.raises(ValueError, match=words):
        paged_attention(
            jnp.zeros((1, 1, change.get("heads", 4), head_dim), change.get("q", jnp.bfloat16)),
            pool, jnp.ones(pool.shape[:-1]) if pool.dtype == jnp.int8 else None, 0, jnp.ones((1, 1), jnp.int32),
            jnp.ones(1, jnp.int32), jnp.ones(1, jnp.int32), num_pages=2, scale_factor=1.0, window=0, softcap=0.0,
            backend=BACKEND, tiles=change.get("tiles"),
        )  # fmt: skip
