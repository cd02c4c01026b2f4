"""Compiles the TPU kernel with the real TPU compiler, with no TPU: `python -m tests.kernels.tpu_worker v6e NAME...`
prints one line of JSON a shape.

A process of its own, because libtpu is found by the environment before jax starts (`tests.compilers.harness`)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import paged_attention

REPLICATED = Spec()
# device: a topology with it, of which one chip is compiled for
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call, as a step of a served model makes it.  Letters as in `pallas_kernels.paged_attention`."""

    rows: int = 64
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    pool_dim: int = 128
    page_size: int = 64
    columns: int = 128
    dtype: str = "bfloat16"  # of the pool
    softcap: float = 0.0
    pages: int = 8192
    chips: int = 1  # over which kv heads are split; the numbers above are of all chips together
    layers: int = 1  # in a scan


SHAPES: Mapping[str, Shape] = {
    "llama3_8b_decode": Shape(),
    "llama3_8b_verify": Shape(queries=5),
    "llama3_8b_prefill": Shape(rows=4, queries=512),
    "llama3_8b_prefill_uneven": Shape(rows=4, queries=300),
    "llama3_8b_long_table": Shape(rows=256, columns=2048),
    "llama3_8b_scan_on_four_chips": Shape(chips=4, layers=8, pages=2048),
    "llama3_8b_one_of_eight_chips": Shape(heads=4, kv_heads=1, pages=32768),
    "llama3_8b_one_of_eight_chips_prefill": Shape(rows=4, queries=512, heads=4, kv_heads=1, pages=32768),
    "llama3_8b_int8": Shape(dtype="int8", page_size=128),
    "llama3_8b_int8_pages_of_32": Shape(dtype="int8", page_size=32),
    "llama3_8b_int8_prefill": Shape(dtype="int8", page_size=128, rows=4, queries=512),
    "llama3_8b_float8": Shape(dtype="float8_e4m3fn", page_size=128),
    "llama3_70b_one_of_eight_chips": Shape(heads=8, kv_heads=1, page_size=16, columns=1024, pages=65536),
    "llama2_7b_decode": Shape(kv_heads=32, pages=2048),
    "llama2_7b_prefill": Shape(kv_heads=32, rows=4, queries=512, pages=2048),
    "qwen3_0.6b_decode": Shape(heads=16, page_size=16, columns=256),
    "qwen3_0.6b_pages_of_32": Shape(heads=16, page_size=32),
    "gemma2_decode": Shape(heads=8, kv_heads=4, head_dim=256, pool_dim=256, softcap=50.0),
    "gemma2_27b_float32_prefill": Shape(
        heads=32, kv_heads=16, dtype="float32", rows=2, queries=2048, pages=2048, softcap=50.0
    ),
    "gemma3_decode": Shape(heads=4, kv_heads=1, head_dim=256, pool_dim=256, page_size=128),
    "gemma3_prefill": Shape(heads=4, kv_heads=1, head_dim=256, pool_dim=256, rows=4, queries=512),
    "smollm2_decode": Shape(heads=9, kv_heads=3, head_dim=64, pages=16384),
    "smollm2_float32": Shape(heads=9, kv_heads=3, head_dim=64, dtype="float32"),
    "smollm2_float32_prefill": Shape(heads=9, kv_heads=3, head_dim=64, dtype="float32", rows=4, queries=256),
}


def compile_shape(device: str, shape: Shape) -> dict[str, int | float]:
    """-> facts of the compiled program.  Raises what the compiler raises."""
    chips = topologies.get_topology_desc(TOPOLOGIES[device], "tpu").devices[: shape.chips]
    mesh = Mesh(np.array(chips), ("tp",))
    heads, pool = Spec(None, None, "tp", None), Spec(None, None, "tp", None, None)

    def struct(*dims: int, dtype: str = "int32", spec: Spec = REPLICATED) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    def attend(q, data, scale, layer, window, table, kv_len, q_len):
        return paged_attention(
            q, data, scale, layer, table, kv_len, q_len, num_pages=shape.pages, scale_factor=shape.head_dim**-0.5,
            window=window, softcap=shape.softcap, backend="pallas_tpu",
        )  # fmt: skip

    if shape.chips > 1:
        specs = (heads, pool, heads, *(REPLICATED,) * 5)
        attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)

    def layers(q, data, scale, window, *rest):
        def layer(q, index):
            return attend(q, data, scale, index, window, *rest), None

        return jax.lax.scan(layer, q, jnp.arange(shape.layers, dtype=jnp.int32))[0]

    is_narrow = jnp.dtype(shape.dtype).itemsize == 1
    q = struct(
        shape.rows, shape.queries, shape.heads, shape.head_dim,
        dtype="float32" if shape.dtype == "float32" else "bfloat16", spec=heads,
    )  # fmt: skip
    kv = (shape.layers * shape.pages, 2, shape.kv_heads, shape.page_size)
    data = struct(*kv, shape.pool_dim, dtype=shape.dtype, spec=pool)
    # The owner of a pool lays its scales out as the kernel reads them: page after page.
    in_order = Format(Layout((0, 1, 2, 3)), NamedSharding(mesh, heads))
    scale = jax.ShapeDtypeStruct(kv, "float32", sharding=in_order) if is_narrow else None
    rest = struct(), struct(shape.rows, shape.columns), struct(shape.rows), struct(shape.rows)
    with jax.set_mesh(mesh):
        compiled = jax.jit(layers).lower(q, data, scale, *rest).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool_bytes = prod(data.shape) * jnp.dtype(shape.dtype).itemsize // shape.chips
    return {
        "pool_bytes": pool_bytes,
        "scale_bytes": prod(kv) * 4 // shape.chips if is_narrow else 0,
        "temp_bytes": memory.temp_size_in_bytes,
        "largest_result_bytes": _largest_result(text),
        "kernel_calls": len(re.findall(r'custom_call_target="tpu_custom_call"', text)),
        "flops": (compiled.cost_analysis() or {}).get("flops", 0.0),
    }


def _largest_result(text: str) -> int:
    """Bytes of the largest array that an operation of the program writes: copies count, wherever they are put."""
    bits = {"pred": 8, "s8": 8, "u8": 8, "f8e4m3fn": 8, "bf16": 16, "s32": 32, "u32": 32, "f32": 32}
    results = re.findall(r"= (\w+)\[([\d,]*)\]\S* (?:copy|fusion|transpose|pad|convert|reshape|custom-call)\(", text)
    return max(bits[kind] // 8 * prod(int(dim) for dim in dims.split(",") if dim) for kind, dims in results)


def main(device: str, names: list[str]) -> None:
    for name in names:
        print(json.dumps({"name": name} | compile_shape(device, SHAPES[name])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
