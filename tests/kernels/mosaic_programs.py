"""Attention calls of real models' steps on Mosaic GPU, as programs for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import paged_attention

HEADS = {  # query heads, kv heads, head dim, softcap
    "llama3": (32, 8, 128, 0.0),
    "gemma2": (8, 4, 256, 50.0),
    "gemma3": (4, 1, 256, 0.0),
    "smollm2": (9, 3, 64, 0.0),
}
STEPS = {  # rows, queries
    "decode": (64, 1),
    "one_row": (1, 1),
    "verify": (64, 5),
    "prefill": (4, 512),
}
LAYERS, PAGES = 8, 2048  # of a layer


def program(name: str) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """ "llama3-decode-64": heads, step, tokens a page."""
    model, step, page_size = name.split("-")
    heads, kv_heads, head_dim, softcap = HEADS[model]
    rows, queries = STEPS[step]
    columns = 4096 // int(page_size)

    def attend(q, data, layer, table, kv_len, q_len, window):
        call = partial(paged_attention, num_pages=PAGES, scale_factor=head_dim**-0.5, softcap=softcap)
        return call(q, data, None, layer, table, kv_len, q_len, window=window, backend="pallas_mosaic_gpu")

    def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return attend, [
        array(rows, queries, heads, head_dim, dtype="bfloat16"),
        array(LAYERS * PAGES, 2, kv_heads, int(page_size), head_dim, dtype="bfloat16"),
        array(),
        array(rows, columns),
        array(rows),
        array(rows),
        array(),
    ]
