"""Compiles the Triton kernel with the real CUDA compiler for an H200, with no GPU: `python -m
tests.kernels.gpu_worker NAME...` prints one line of JSON a shape.

A process of its own, because the compiler is found by the environment before jax starts (`tests.compilers.harness`)."""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import paged_attention
from tests.compilers.dumps import dump_into
from tests.kernels import h200

INT32 = jnp.dtype("int32")
KERNEL = "paged_attention_triton"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call, as a step of a served model makes it.  Letters as in `pallas_kernels.paged_attention`."""

    rows: int = 64
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    columns: int = 2048
    dtype: str = "bfloat16"  # of the queries, and of the pool too where pool_dtype is None
    pool_dtype: str | None = None
    softcap: float = 0.0
    layers: int = 32
    pages: int = 1024  # a layer


QWEN, GEMMA = {"heads": 16}, {"heads": 8, "kv_heads": 4, "head_dim": 256, "softcap": 50.0, "layers": 26}
MQA, SMOLLM = {"heads": 4, "kv_heads": 1, "head_dim": 256}, {"heads": 9, "kv_heads": 3, "head_dim": 64}
EXACT = {"dtype": "float32", "layers": 8}
INT8, FLOAT8 = {"pool_dtype": "int8", "pages": 2048}, {"pool_dtype": "float8_e4m3fn", "pages": 2048}
CHUNK = {"rows": 4, "queries": 512}

SHAPES: Mapping[str, Shape] = {
    "llama3": Shape(),
    "llama3_one_row": Shape(rows=1),
    "llama3_verify": Shape(queries=4),
    "llama3_verify_sixteen": Shape(queries=16),
    "llama3_prefill": Shape(**CHUNK),
    "llama3_prefill_many_rows": Shape(rows=16, queries=512),
    "llama3_prefill_one_row": Shape(rows=1, queries=256),
    "llama3_small_pages": Shape(page_size=16, pages=4096),
    "llama3_small_pages_prefill": Shape(**CHUNK, page_size=16, pages=4096),
    "llama3_large_pages": Shape(page_size=128),
    "llama3_one_of_eight_chips": Shape(heads=4, kv_heads=1),
    "qwen3": Shape(**QWEN),
    "qwen3_prefill": Shape(**QWEN, **CHUNK),
    "gemma2": Shape(**GEMMA),
    "gemma2_verify": Shape(**GEMMA, queries=4),
    "gemma2_prefill": Shape(**GEMMA, **CHUNK),
    "gemma2_prefill_many_rows": Shape(**GEMMA, rows=16, queries=512),
    "gemma3": Shape(**MQA),
    "gemma3_prefill": Shape(**MQA, **CHUNK),
    "smollm2": Shape(**SMOLLM),
    "smollm2_verify": Shape(**SMOLLM, queries=5),
    "smollm2_prefill": Shape(**SMOLLM, **CHUNK),
    "llama3_int8": Shape(**INT8),
    "llama3_int8_verify": Shape(**INT8, queries=4),
    "llama3_int8_prefill": Shape(**INT8, **CHUNK),
    "llama3_float8": Shape(**FLOAT8),
    "llama3_float8_small_pages": Shape(**(FLOAT8 | {"page_size": 32, "pages": 8192})),
    "llama3_float8_prefill": Shape(**FLOAT8, **CHUNK),
    "llama3_float8_small_pool": Shape(**FLOAT8, layers=4),
    "gemma2_float8": Shape(**GEMMA, **FLOAT8),
    "gemma2_float8_prefill": Shape(**GEMMA, **FLOAT8, **CHUNK),
    "smollm2_int8": Shape(**SMOLLM, **INT8),
    "llama3_exact": Shape(**EXACT),
    "llama3_exact_small_pages": Shape(**EXACT, page_size=16),
    "llama3_exact_prefill": Shape(**EXACT, **CHUNK),
    "gemma2_exact": Shape(**(GEMMA | EXACT)),
    "gemma2_exact_prefill": Shape(**(GEMMA | EXACT), **CHUNK),
    "smollm2_exact": Shape(**SMOLLM, **EXACT),
    "smollm2_exact_prefill": Shape(**SMOLLM, **EXACT, **CHUNK),
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the compiler made of a shape's kernel."""

    name: str
    entry: str
    registers: int  # a thread
    spilled_bytes: int
    shared_bytes: int  # memory of a program
    wgmma: int  # instructions in its text: matmuls of a warpgroup, of a warp, of float32 by TensorFloat-32
    mma: int
    tf32: int
    copies_of_16: int  # asynchronous copies, by their bytes
    copies_of_8: int
    copies_of_4: int
    offset_bits: int  # of the pool's addresses
    temp_bytes: int  # of the whole program
    pool_bytes: int


def compile_shape(name: str, shape: Shape, dumps: Path) -> Facts:
    """dumps: the folder that XLA_FLAGS names."""
    mesh = h200.mesh()
    pool_dtype = jnp.dtype(shape.pool_dtype or shape.dtype)

    def array(*sizes: int, dtype: jnp.dtype = INT32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, Spec()))

    q = array(shape.rows, shape.queries, shape.heads, shape.head_dim, dtype=jnp.dtype(shape.dtype))
    lines = (shape.layers * shape.pages, 2, shape.kv_heads, shape.page_size)
    data = array(*lines, shape.head_dim, dtype=pool_dtype)
    scale = array(*lines, dtype=jnp.dtype("float32")) if shape.pool_dtype else None

    def attend(q, data, scale, layer, page_table, kv_len, q_len, window):
        return paged_attention(
            q, data, scale, layer, page_table, kv_len, q_len, num_pages=shape.pages, window=window,
            scale_factor=shape.head_dim**-0.5, softcap=shape.softcap, backend="pallas_triton",
        )  # fmt: skip

    said = io.StringIO()  # the kernel in Triton's language
    with jax.set_mesh(mesh), mock.patch.object(pl, "pallas_call", partial(pl.pallas_call, debug=True)):
        with redirect_stdout(said):
            lowered = jax.jit(attend).lower(
                q, data, scale, array(), array(shape.rows, shape.columns), array(shape.rows), array(shape.rows), array()
            )
        before = set(dumps.iterdir())
        compiled = lowered.compile()
    new = set(dumps.iterdir()) - before
    (ptx,) = [path for path in new if path.suffix == ".ptx" and f".entry {KERNEL}" in path.read_text()]
    (thunks,) = [path.read_text() for path in new if path.name.endswith("thunk_sequence.txt")]
    pointers = rf"tt\.addptr .*tensor<\d+x{shape.head_dim}x!tt\.ptr<.*>>, tensor<\d+x{shape.head_dim}xi(\d+)>"
    return Facts(
        name=name,
        **_assembled(ptx),
        shared_bytes=int(re.findall(rf"{KERNEL} .*shared_memory: (\d+)", thunks)[0]),
        offset_bits=max(map(int, re.findall(pointers, said.getvalue()))),
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        pool_bytes=data.size * pool_dtype.itemsize,
    )


def _assembled(path: Path) -> dict[str, str | int]:
    ptx = path.read_text()
    copies = [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\S* .*\], (0x[0-9a-f]+)", ptx)]
    return h200.assemble(path) | {
        "tf32": ptx.count("tf32"),
        "copies_of_16": copies.count(16),
        "copies_of_8": copies.count(8),
        "copies_of_4": copies.count(4),
    }


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as dumps:
        dump_into(dumps)
        for name in names:
            print(json.dumps(asdict(compile_shape(name, SHAPES[name], Path(dumps)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
