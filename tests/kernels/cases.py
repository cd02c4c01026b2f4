"""Random paged-attention problems on real models' head layouts, with NaN wherever nobody may look, and their float64
answers.  Shared by the tests of every backend; Pallas backends run interpreted."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
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
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # an 8-bit pool's largest number

# A backend's pool has its head dim padded to a multiple of this by its owner.
HEAD_DIM_MULTIPLE = {"pallas_tpu": 128}
# backend: what cannot be run of it here, and why.  A key is one of `Case.traits`: a shape's name, a pool's dtype,
# "queries=4", "page_size=16", or "any".
NOT_RUN: Mapping[str, Mapping[str, str]] = {
    "pallas_mosaic_gpu": dict.fromkeys(("float32", "int8", "float8_e4m3fn"), "serves bfloat16 pools alone")
    | (
        {"any": f"jax has a simulator of it from 0.11 on, this is {jax.__version__}"}
        if jax.__version_info__ < (0, 11)
        else {}
    ),
    "native": dict.fromkeys(("bfloat16", "int8", "float8_e4m3fn"), "serves float32 pools alone")
    | ({} if importlib.util.find_spec("llvmlite") else {"any": "llvmlite is not installed"}),
}


def is_interpreted(backend: str) -> bool:
    return backend.startswith("pallas_")


def matrix(*axes: Iterable, interpreted: set[tuple]) -> list:
    """Parameters (backend, *point): every point of `axes` for every backend.  An interpreted backend takes seconds a
    point, so only the points of `interpreted` are in its plain test run; the others are marked `full`."""
    points = list(product(*axes))
    if unknown := interpreted - set(points):
        raise ValueError(f"{unknown} are no points of the matrix")
    return [
        pytest.param(
            backend, *point, marks=[pytest.mark.full] if is_interpreted(backend) and point not in interpreted else []
        )
        for backend in BACKENDS
        for point in points
    ]


class Case:
    """Random ragged rows, an idle one among them; unread pages, unwritten positions and the scrap page hold NaN (an
    int8 pool: NaN in their scales).

    dtype: of queries and pool; pool_dtype: of an 8-bit pool, whose scales are random.  kv_len: other rows than the usual
    ones; each has `queries` queries, or as many as it is long."""

    def __init__(
        self,
        shape: str,
        *,
        queries: int,
        page_size: int = 16,
        dtype: str = "float32",
        pool_dtype: str | None = None,
        kv_len: Sequence[int] = (),
        seed: int = 0,
    ):
        rng = np.random.default_rng(seed)
        heads, self.kv_heads, head_dim, self.window, self.softcap = SHAPES[shape]
        self.traits = {shape, pool_dtype or dtype, f"queries={queries}", f"page_size={page_size}", "any"}
        self.scale_factor = head_dim**-0.5
        self.dtype, self.layer = jnp.dtype(dtype), 1
        self.kv_len = np.array(kv_len or [150, 0, queries, 67, min(page_size * 4, 128)], np.int32)
        self.q_len = np.minimum(queries, self.kv_len)
        if not kv_len:
            self.q_len[3] = min(max(1, queries - 1), self.kv_len[3])
        columns = -(-(max(self.kv_len) + 50) // page_size)
        self.num_pages = 1 + len(self.kv_len) * columns
        pages = 1 + rng.permutation(self.num_pages - 1)[: len(self.kv_len) * columns]
        self.table = pages.reshape(len(self.kv_len), columns).astype(np.int32)
        values = np.full((LAYERS * self.num_pages, 2, self.kv_heads, page_size, head_dim), np.nan, np.float32)
        for row, length in enumerate(self.kv_len):
            for position in range(length):
                page = self.layer * self.num_pages + self.table[row, position // page_size]
                values[page, :, :, position % page_size] = rng.standard_normal((2, self.kv_heads, head_dim))
        self.q = rng.standard_normal((len(self.kv_len), queries, heads, head_dim)).astype(self.dtype)
        self.scale: np.ndarray | None = None
        if pool_dtype is None:
            self.data = values.astype(self.dtype)
        else:
            self.data, self.scale = _quantise(values, pool_dtype, rng)

    def run(self, backend: str, rows: slice = slice(None), tiles: Mapping[str, int] | None = None) -> np.ndarray:
        """[R, Q, N, H] float32.  Skips what cannot be run of the backend here."""
        for trait, reason in NOT_RUN.get(backend, {}).items():
            if trait in self.traits:
                pytest.skip(f"{backend}: {reason}")
        data = pad_head_dim(self.data, HEAD_DIM_MULTIPLE.get(backend, 1))
        function = jax.jit(
            paged_attention,
            static_argnames=("num_pages", "scale_factor", "softcap", "backend", "tiles", "interpret"),
        )
        out = function(
            self.q[rows], data, self.scale, jnp.int32(self.layer), self.table[rows], self.kv_len[rows],
            self.q_len[rows], num_pages=self.num_pages, scale_factor=self.scale_factor, window=jnp.int32(self.window),
            softcap=self.softcap, backend=backend, tiles=None if tiles is None else _Tiles(tiles),
            interpret=is_interpreted(backend),
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
                    kv = self.data[pages, :, head // group, seen % page_size].astype(np.float64)  # [S, 2, H]
                    if self.scale is not None:
                        kv *= self.scale[pages, :, head // group, seen % page_size].astype(np.float64)[..., None]
                    scores = kv[:, 0] @ self.q[row, i, head].astype(np.float64) * self.scale_factor
                    if self.softcap:
                        scores = self.softcap * np.tanh(scores / self.softcap)
                    weights = np.exp(scores - scores.max())
                    out[row, i, head] = weights @ kv[:, 1] / weights.sum()
        return out


class _Tiles(dict):
    """Block sizes as a static argument of jit."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _quantise(values: np.ndarray, dtype: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """[..., H] float32 -> 8-bit numbers and their scales [...] float32; scales reach four times above the least ones."""
    written = ~np.isnan(values[..., 0])
    largest = LARGEST[dtype]
    scale = np.abs(values).max(-1) / largest * rng.uniform(1, 4, values.shape[:-1])
    numbers = np.where(written[..., None], values / scale[..., None], largest)
    if dtype == "int8":
        return np.rint(numbers).astype(np.int8), scale.astype(np.float32)
    numbers = np.where(written[..., None], numbers, np.nan)
    return numbers.astype(ml_dtypes.float8_e4m3fn), scale.astype(np.float32)


def pad_head_dim(array: np.ndarray, multiple: int) -> np.ndarray:
    pad = -array.shape[-1] % multiple
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, pad)]) if pad else array
