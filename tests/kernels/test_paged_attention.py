"""Every backend of paged attention against a float64 oracle, on real models' head layouts, with NaN wherever nobody may
look."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import IMPLEMENTATIONS, paged_attention

BACKENDS = sorted(IMPLEMENTATIONS["paged_attention"])
# name: query heads, kv heads, head dim, window, softcap
SHAPES = {
    "smollm2": (9, 3, 64, 0, 0.0),
    "llama3": (32, 8, 128, 0, 0.0),
    "qwen3": (16, 8, 128, 0, 0.0),
    "gemma2": (8, 4, 256, 40, 50.0),
    "gemma3": (4, 1, 256, 24, 0.0),
    "mha": (4, 4, 32, 0, 0.0),
}
LAYERS, TOLERANCE = 2, {"float32": 2e-5, "bfloat16": 2e-2}


class Case:
    """Random ragged rows, an idle one among them; unread pages, unwritten positions and the scrap page hold NaN."""

    def __init__(self, shape: str, *, queries: int, page_size: int = 16, dtype: str = "float32", seed: int = 0):
        rng = np.random.default_rng(seed)
        heads, self.kv_heads, head_dim, self.window, self.softcap = SHAPES[shape]
        self.scale = head_dim**-0.5
        self.kv_len = np.array([150, 0, queries, 67, min(page_size * 4, 128)], np.int32)
        self.q_len = np.minimum(np.array([queries, 0, queries, max(1, queries - 1), queries], np.int32), self.kv_len)
        columns = -(-200 // page_size)
        self.num_pages = 1 + len(self.kv_len) * columns
        pages = 1 + rng.permutation(self.num_pages - 1)[: len(self.kv_len) * columns]
        self.table = pages.reshape(len(self.kv_len), columns).astype(np.int32)
        self.data = np.full((LAYERS * self.num_pages, 2, self.kv_heads, page_size, head_dim), np.nan, np.float32)
        self.layer = 1
        for row, length in enumerate(self.kv_len):
            for position in range(length):
                page = self.layer * self.num_pages + self.table[row, position // page_size]
                self.data[page, :, :, position % page_size] = rng.standard_normal((2, self.kv_heads, head_dim))
        self.q = rng.standard_normal((len(self.kv_len), queries, heads, head_dim)).astype(np.float32)
        self.dtype = jnp.dtype(dtype)
        self.data = np.array(jnp.asarray(self.data, self.dtype).astype(jnp.float32))
        self.q = np.array(jnp.asarray(self.q, self.dtype).astype(jnp.float32))

    def run(self, backend: str, rows: slice = slice(None)) -> np.ndarray:
        function = jax.jit(
            paged_attention, static_argnames=("num_pages", "scale_factor", "softcap", "backend"),
        )  # fmt: skip
        out = function(
            jnp.asarray(self.q[rows], self.dtype), jnp.asarray(self.data, self.dtype), None, jnp.int32(self.layer),
            self.table[rows], self.kv_len[rows], self.q_len[rows], num_pages=self.num_pages, scale_factor=self.scale,
            window=jnp.int32(self.window), softcap=self.softcap, backend=backend,
        )  # fmt: skip
        return np.asarray(out.astype(jnp.float32))

    def oracle(self) -> np.ndarray:
        """One query at a time, in float64, reading only what it may see."""
        out = np.zeros(self.q.shape)
        group = self.q.shape[2] // self.kv_heads
        page_size = self.data.shape[3]
        for row, (kv_len, q_len) in enumerate(zip(self.kv_len, self.q_len, strict=True)):
            for i in range(q_len):
                at = kv_len - q_len + i
                seen = np.arange(max(0, at - self.window + 1) if self.window else 0, at + 1)
                pages = self.layer * self.num_pages + self.table[row, seen // page_size]
                for head in range(self.q.shape[2]):
                    keys, values = (
                        self.data[pages, :, head // group, seen % page_size].astype(np.float64).swapaxes(0, 1)
                    )
                    scores = keys @ self.q[row, i, head].astype(np.float64) * self.scale
                    if self.softcap:
                        scores = self.softcap * np.tanh(scores / self.softcap)
                    weights = np.exp(scores - scores.max())
                    out[row, i, head] = weights @ values / weights.sum()
        return out


@pytest.mark.parametrize("queries", [1, 4, 32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_equals_the_oracle_and_reads_nothing_else(backend: str, shape: str, queries: int) -> None:
    case = Case(shape, queries=queries)
    np.testing.assert_allclose(case.run(backend), case.oracle(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_page_sizes_and_dtypes(backend: str, dtype: str, page_size: int) -> None:
    for shape, queries in (("smollm2", 1), ("gemma3", 5)):
        case = Case(shape, queries=queries, page_size=page_size, dtype=dtype)
        np.testing.assert_allclose(case.run(backend), case.oracle(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("queries", [1, 4])
def test_a_row_does_not_depend_on_its_mates(queries: int) -> None:
    """Alone, or beside longer and shorter ones: the same to rounding noise."""
    case = Case("smollm2", queries=queries)
    together = case.run("xla")
    for row in range(len(case.kv_len)):
        np.testing.assert_allclose(case.run("xla", slice(row, row + 1))[0], together[row], rtol=0, atol=1e-6)


def test_idle_rows_and_padded_queries_give_zeros() -> None:
    case = Case("smollm2", queries=4)
    for backend in BACKENDS:
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
    q = np.zeros(change.get("q", case.q.shape), np.float32)
    table = np.asarray(case.table, change.get("table", np.int32))
    with pytest.raises(ValueError, match=words):
        paged_attention(
            q, case.data, None, 0, table, case.kv_len, case.q_len,
            num_pages=change.get("num_pages", case.num_pages), scale_factor=1.0, window=0,
            softcap=change.get("softcap", 0.0), backend=change.get("backend", "xla"),
        )  # fmt: skip
