"""Every backend of paged attention against a float64 oracle, on real models' head layouts, with NaN wherever nobody may
look."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from tests.kernels.cases import BACKENDS, LARGEST, SHAPES, TOLERANCE, Case, matrix


@pytest.mark.parametrize(
    ("backend", "shape", "queries"),
    matrix(SHAPES, [1, 4, 32], interpreted={("smollm2", 1), ("llama3", 4), ("gemma2", 32)}),
)
def test_attention_equals_the_oracle_and_reads_nothing_else(backend: str, shape: str, queries: int) -> None:
    case = Case(shape, queries=queries)
    np.testing.assert_allclose(case.run(backend), case.oracle(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("backend", "dtype", "page_size", "shape"),
    matrix(
        ["float32", "bfloat16"],
        [16, 32, 64, 128],
        ["smollm2", "gemma3"],
        interpreted={("bfloat16", 16, "smollm2"), ("bfloat16", 64, "gemma3")},
    ),
)
def test_page_sizes_and_dtypes(backend: str, dtype: str, page_size: int, shape: str) -> None:
    case = Case(shape, queries={"smollm2": 1, "gemma3": 5}[shape], page_size=page_size, dtype=dtype)
    np.testing.assert_allclose(case.run(backend), case.oracle(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("backend", "pool_dtype", "shape"),
    matrix(sorted(LARGEST), ["qwen3", "gemma2"], interpreted={("int8", "gemma2"), ("float8_e4m3fn", "qwen3")}),
)
def test_eight_bit_pages_are_read_with_their_scales(backend: str, pool_dtype: str, shape: str) -> None:
    """As if the pool held the floats data * scale."""
    queries, page_size = {"qwen3": (1, 128), "gemma2": (5, 32)}[shape]
    case = Case(shape, queries=queries, page_size=page_size, pool_dtype=pool_dtype)
    np.testing.assert_allclose(case.run(backend), case.oracle(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("queries", [1, 4])
def test_a_row_does_not_depend_on_its_mates(queries: int) -> None:
    """Alone, or beside longer and shorter ones: the same to rounding noise."""
    case = Case("smollm2", queries=queries)
    together = case.run("xla")
    for row in range(len(case.kv_len)):
        np.testing.assert_allclose(case.run("xla", slice(row, row + 1))[0], together[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_rows_and_padded_queries_give_zeros(backend: str) -> None:
    case = Case("smollm2", queries=4)
    out = case.run(backend)
    assert not out[1].any()
    assert not out[3, case.q_len[3] :].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": (5, 1, 8, 64)}, "8 query heads"),
        ({"q": (5, 1, 9, 80)}, "head dim 80"),
        ({"table": np.int64}, "int32"),
        ({"num_pages": 7}, "num_pages=7"),
        ({"softcap": -1.0}, "softcap"),
        ({"backend": "cuda"}, "xla"),
    ],
)
def test_refuses_what_it_says_it_refuses(change: dict, words: str) -> None:
    case = Case("smollm2", queries=1)
    q = jnp.zeros(change.get("q", case.q.shape), jnp.float32)
    table = np.asarray(case.table, change.get("table", np.int32))
    with pytest.raises(ValueError, match=words):
        paged_attention(
            q, case.data, None, 0, table, case.kv_len, case.q_len,
            num_pages=change.get("num_pages", case.num_pages), scale_factor=1.0, window=0,
            softcap=change.get("softcap", 0.0), backend=change.get("backend", "xla"),
        )  # fmt: skip
