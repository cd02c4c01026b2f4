"""Random paged-attention problems of real models' shapes, made on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.device.attention import pool_head_dim
from jaxserve.device.sharding import make_mesh
from pallas_kernels import paged_attention
from pallas_kernels.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention: N query heads, K kv heads, head dim H, window (0 = none), softcap (0 = none)."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0


MODELS = {
    "llama3-8b": Heads(32, 8, 128),
    "qwen3-0.6b": Heads(16, 8, 128),
    "gemma3": Heads(4, 1, 256, window=512),
    "gemma2": Heads(8, 4, 256, window=4096, softcap=50.0),
    "smollm2": Heads(9, 3, 64),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One call's arguments.  Pages that no row owns, and the scrap page, hold NaN."""

    model: Heads
    q: Array  # [R, Q, N, H]
    data: Array  # [NP, 2, K, T, H']
    page_table: Array  # [R, P] int32
    kv_len: Array  # [R] int32
    q_len: Array  # [R] int32

    @staticmethod
    def random(
        model: Heads,
        lengths: Sequence[int],
        *,
        queries: int,
        page_size: int,
        dtype: str,
        seed: int = 0,
    ) -> Problem:
        """lengths: kv_len of each row, 0 = idle."""
        rng = np.random.default_rng(seed)
        columns = -(-max(lengths) // page_size)
        owned = [-(-length // page_size) for length in lengths]
        num_pages = 2 + sum(owned)
        ids = (1 + rng.permutation(num_pages - 1)).tolist()  # one page stays nobody's
        table = np.zeros((len(lengths), columns), np.int32)
        for row, count in enumerate(owned):
            table[row, :count] = [ids.pop() for _ in range(count)]
        pool_dim = pool_head_dim(model.head_dim, make_mesh(jax.devices(), 1))
        shape = (num_pages, 2, model.kv_heads, page_size, model.head_dim)
        data = jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
        data = jnp.pad(data, [(0, 0)] * 4 + [(0, pool_dim - model.head_dim)])
        data = data.at[jnp.array([0, *ids])].set(jnp.nan)
        q = jax.random.normal(jax.random.key(seed + 1), (len(lengths), queries, model.heads, model.head_dim))
        kv_len = np.array(lengths, np.int32)
        return Problem(
            model=model, q=q.astype(dtype), data=data, page_table=jnp.asarray(table), kv_len=jnp.asarray(kv_len),
            q_len=jnp.asarray(np.minimum(kv_len, queries)),
        )  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        """Keys and values that the rows' lengths (and the window) make a call read."""
        seen = np.asarray(self.kv_len)
        if self.model.window:
            seen = np.minimum(seen, self.model.window + self.q.shape[1] - 1)
        return int(seen.sum()) * 2 * self.data.shape[2] * self.data.shape[4] * self.data.dtype.itemsize

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.q, self.data, self.page_table, self.kv_len, self.q_len

    def function(self, backend: str, tiles: Tiles | None = None):
        """-> attention(*arrays) -> [R, Q, N, H]."""
        model, num_pages = self.model, self.data.shape[0]

        def attention(q: Array, data: Array, page_table: Array, kv_len: Array, q_len: Array) -> Array:
            return paged_attention(
                q, data, None, 0, page_table, kv_len, q_len, num_pages=num_pages,
                scale_factor=model.head_dim**-0.5, window=model.window, softcap=model.softcap, backend=backend,
                tiles=tiles,
            )  # fmt: skip

        return attention
