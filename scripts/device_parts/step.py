"""Part `step`: a whole decode step of an 8B model with random weights, in bytes read per second over the copy rate."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.catalogue import Catalogue
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.device.sharding import make_mesh
from jaxserve.device.slots import fill_slots
from jaxserve.device.steps import HEAD, Params
from jaxserve.models.decoder import Decoder
from jaxserve.models.tree import abstract_params, layout_for, make_model
from jaxserve.programs import Programs

from . import PLATFORM_BACKENDS, Report
from .measure import copy_bytes_per_second

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = LLAMA_3_8B | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024,
                      "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
PAGE_SIZE = 64


def run(device: jax.Device, quick: bool) -> Report:  # pyright: ignore[reportInvalidTypeForm]
    copy = copy_bytes_per_second(megabytes=64 if quick else 1024)
    report = Report(
        f"a decode step of Llama-3-8B's shape; a copy moves {copy / 1e9:.0f} GB/s",
        ("backend", "rows", "context", "ms", "GB/s", "of a copy"),
    )
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    mesh = make_mesh([device], 1)
    model = make_model(SMALL if quick else LLAMA_3_8B, dtype=dtype, tensor_parallel=1)
    params = random_params(model, mesh)
    backend = next(name for name in PLATFORM_BACKENDS[device.platform])
    for rows, context in ((4, 128),) if quick else ((1, 1024), (16, 1024), (64, 1024), (64, 4096)):
        seconds, nbytes = _decode_seconds(model, params, mesh, backend=backend, rows=rows, context=context)
        report.rows.append((backend, rows, context, seconds * 1e3, nbytes / seconds / 1e9, nbytes / seconds / copy))
    return report


def random_params(model: Decoder, mesh: Mesh) -> Params:
    """Small normal weights, made on the device one by one."""

    def draw(key, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        spread = jnp.bfloat16(model.config.width**-0.5)
        make = jax.jit(
            lambda key: (jax.random.normal(key, leaf.shape, jnp.bfloat16) * spread).astype(leaf.dtype),
            out_shardings=leaf.sharding if leaf.format.layout is None else leaf.format,
        )
        return make(key)

    leaves, tree = jax.tree.flatten(abstract_params(model, mesh, layout_for(mesh)))
    return tree.unflatten(map(draw, jax.random.split(jax.random.key(0), len(leaves)), leaves))


def _decode_seconds(
    model: Decoder, params: Params, mesh: Mesh, *, backend: str, rows: int, context: int
) -> tuple[float, int]:
    """-> (median seconds of a step, bytes of weights, keys and values it must read)."""
    columns = -(-(context + 64) // PAGE_SIZE)
    scheduler = SchedulerConfig(
        slots=rows, page_size=PAGE_SIZE, num_pages=rows * columns + 1, max_len=columns * PAGE_SIZE, queue_limit=rows,
        decode_buckets=(rows,), prefill_buckets=((1, 16),),
    )  # fmt: skip
    catalogue = Catalogue.of(model, scheduler, EngineConfig(slots=rows), mesh=mesh, backend=backend)
    programs, name = Programs(), f"decode {rows}"
    programs.compile({name: catalogue.wanted(params)[name]})
    pool, slots = catalogue.new_pool(), fill_slots(catalogue.new_slots(), length=context, limit=context + 8)
    slots = jax.device_put(slots, catalogue.replicated)
    weights = jax.tree.leaves(params)
    packed = np.zeros((rows, HEAD + scheduler.pages_per_row), np.int32)
    packed[:, 0], packed[:, 1], packed[:, 3] = range(rows), 1, 1
    packed[:, HEAD:] = np.arange(1, rows * columns + 1, dtype=np.int32).reshape(rows, columns)
    times = []
    for _ in range(8):
        began, steps = time.perf_counter(), 5
        for _ in range(steps):
            forwarded, pool = programs[name](weights, pool, slots, packed)
        jax.block_until_ready((forwarded, pool))
        times.append((time.perf_counter() - began) / steps)
    shape = model.shape
    kv_bytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * context * rows * jnp.dtype(model.dtype).itemsize
    # Of the embedding a step reads one row each; of an untied head it reads all.
    skipped = 0 if model.config.is_tied else params["outer"]["embed"].nbytes
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - skipped
    return sorted(times[1:])[len(times) // 2], weight_bytes + kv_bytes
