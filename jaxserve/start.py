"""From an operator's choices to an engine that is ready: devices, weights, pool, programs.

Every choice that `auto` leaves open is made here, once, and printed; nothing falls back in silence.  ValueErrors name
the flag and the numbers."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
from jax import Device
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from checkpoints import open_checkpoint
from checkpoints.hub import resolve
from checkpoints.packaged import cache_folder
from jaxserve.buckets import decode_buckets, prefill_buckets, verify_shapes
from jaxserve.catalogue import Catalogue
from jaxserve.config import KV_8_BITS, EngineConfig, SchedulerConfig
from jaxserve.device.attention import TPU_LANES, why_not
from jaxserve.device.draft_model import SecondModel
from jaxserve.device.sharding import make_mesh
from jaxserve.device.speculate import Draft
from jaxserve.device.steps import Params
from jaxserve.draft_model import load_draft_model
from jaxserve.drafts import make_draft
from jaxserve.engine import Engine, ModelInfo
from jaxserve.models.decoder import Decoder
from jaxserve.models.loading import load_params, pack_matrices
from jaxserve.models.tree import make_model
from jaxserve.programs import compile_counter
from jaxserve.runner import Runner
from jaxserve.shelf import Shelf
from jaxserve.steptimes import measure_steps
from jaxserve.text import load_tokenizer

DEFAULT_MAX_LEN = 8192
NEEDS_LLVMLITE = "it needs llvmlite: pip install 'jaxserve[cpu]'"
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
KERNELS = {"cpu": "native", "tpu": "pallas_tpu", "gpu": "pallas_triton"}  # what --attention-backend=auto tries first


def load_engine(config: EngineConfig, *, console: Console | None = None) -> Engine:
    """Read the model, size the pool, compile every program.  console: where the start is told; None = nowhere."""
    console = console or Console(quiet=True)
    compile_counter()
    cache = use_compile_cache(config.compile_cache)
    began = time.perf_counter()
    devices = find_devices(config.accelerator)
    mesh = make_mesh(devices, config.tensor_parallel)
    dtype = config.dtype if config.dtype != "auto" else ("float32" if devices[0].platform == "cpu" else "bfloat16")
    files = resolve(config.model)
    described = make_model(open_checkpoint(files).config, dtype=dtype, tensor_parallel=mesh.size)
    backend, reason = choose_attention(config, model=described, mesh=mesh)
    matmul, matmul_reason = choose_matmul(config, dtype=dtype, mesh=mesh)
    tokenizer = load_tokenizer(files)
    model, params = load_params(files, dtype=dtype, mesh=mesh)
    load_second = partial(
        load_draft_model, config=config, target=model, tokenizer=tokenizer, max_len=max_len_of(config, model), mesh=mesh,
        backend=backend, matmul=matmul,
    )  # fmt: skip
    if matmul == "native":
        params = pack_matrices(model, params)
    draft = make_draft(config.draft, model, load_second)
    loaded = time.perf_counter()
    catalogue = plan_memory(config, model=model, params=params, draft=draft, mesh=mesh, backend=backend)
    runner = Runner(params, catalogue, Shelf.of(catalogue.said, cache, mesh.devices.flat))
    misses = compile_counter().cache_misses
    seconds = runner.warm_up()
    times = measure_steps(runner) if catalogue.draft and catalogue.scheduler.is_adaptive else ()
    scheduler = replace(catalogue.scheduler, prefill_seconds=seconds, step_times=times)
    info = ModelInfo(
        name=files.name,
        architecture=model.config.architecture,
        vocab=model.shape.vocab,
        max_len=scheduler.max_len,
        dtype=dtype,
        device=f"{mesh.size} x {devices[0].device_kind}",
        attention_backend=backend,
        parameters=sum(math.prod(weight.shape) * len(model.copies(path)) for path, weight in model.weights().items()),
        pool_tokens=scheduler.pool_tokens,
    )
    misses = compile_counter().cache_misses - misses
    _tell(
        console, runner, info, scheduler, reason=f"{reason}), products {matmul} ({matmul_reason}",
        loading=loaded - began, warming=time.perf_counter() - loaded, misses=misses,
    )  # fmt: skip
    return Engine(config, runner=runner, scheduler_config=scheduler, tokenizer=tokenizer, info=info)


def find_devices(accelerator: str) -> Sequence[Device]:  # pyright: ignore[reportInvalidTypeForm]
    """The devices to run on.  ValueError with the extra to install when they are not there."""
    if accelerator == "auto":
        return jax.devices()
    try:
        return jax.devices(PLATFORMS[accelerator])
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        extra = {"gpu": "jax_cuda13_plugin", "tpu": "libtpu"}.get(accelerator)
        if extra and importlib.util.find_spec(extra) is None:
            raise ValueError(
                f"--accelerator={accelerator} needs its runtime: pip install 'jaxserve[{accelerator}]' ({reason})"
            ) from None
        raise ValueError(f"--accelerator={accelerator}: no such device here ({reason})") from None


def choose_attention(config: EngineConfig, *, model: Decoder, mesh: Mesh) -> tuple[str, str]:
    """-> the backend of paged attention, and why that one.

    Raises ValueError when the one that is asked for cannot serve this model here."""

    def refusal(backend: str) -> str | None:
        if backend == "native" and not has_llvmlite():
            return NEEDS_LLVMLITE
        return why_not(
            backend, shape=model.shape, softcap=model.config.attention_softcap, dtype=model.dtype,
            kv_dtype=config.kv_dtype_for(model.dtype), page_size=config.page_size, queries=config.prefill_chunk, mesh=mesh,
        )  # fmt: skip

    platform = mesh.devices.flat[0].platform
    if platform == "tpu" and config.kv_dtype in KV_8_BITS and config.page_size % TPU_LANES:
        raise ValueError(
            f"kv_dtype={config.kv_dtype} on a TPU needs page_size={TPU_LANES} or a multiple, not {config.page_size}: the scales of"
            " a page fill whole registers, else the compiler copies all of them at every step"
        )
    asked = config.attention_backend
    if asked != "auto":
        if refused := refusal(asked):
            raise ValueError(f"attention_backend={asked!r} cannot serve here: {refused}")
        return asked, "as asked"
    kernel = KERNELS.get(platform)
    if kernel is None:
        return "xla", f"no kernel for the platform {platform}"
    refused = refusal(kernel)
    return ("xla", f"{kernel} cannot serve here: {refused}") if refused else (kernel, f"the kernel for {platform}")


def choose_matmul(config: EngineConfig, *, dtype: str, mesh: Mesh) -> tuple[str, str]:
    """-> what multiplies by the weights, and why that.  Raises ValueError when what is asked for cannot serve here."""
    platform = mesh.devices.flat[0].platform
    if platform != "cpu" or mesh.size > 1:
        refused = f"native runs on one cpu device, this is {mesh.size} x {platform}"
    elif dtype != "float32":
        refused = f"native multiplies float32 weights, these are {dtype}"
    elif not has_llvmlite():
        refused = NEEDS_LLVMLITE
    else:
        refused = None
    asked = config.matmul_backend
    if asked == "native" and refused:
        raise ValueError(f"matmul_backend='native' cannot serve here: {refused}")
    if asked != "auto":
        return asked, "as asked"
    return ("xla", refused) if refused else ("native", "the kernel for cpu")


def has_llvmlite() -> bool:
    return importlib.util.find_spec("llvmlite") is not None


def use_compile_cache(folder: str) -> Path | None:
    """jax's persistent compile cache: a second start compiles nothing.  -> its folder."""
    if folder == "off":
        return None
    if folder == "auto":
        folder = str(cache_folder() / "programs")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the compile cache folder {folder} cannot be made ({error}); name one with --compile-cache"
        ) from None
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Path(folder)


def plan_memory(
    config: EngineConfig, *, model: Decoder, params: Params, draft: Draft | None, mesh: Mesh, backend: str
) -> Catalogue:
    """Pages and buckets: what is fixed before the first program is compiled."""
    catalogue_for = partial(catalogue_of, config, model=model, draft=draft, mesh=mesh, backend=backend)
    if config.pool != "auto":
        return catalogue_for(pages=-(-int(config.pool) // config.page_size))
    smallest = catalogue_for()
    own = smallest.draft_bytes(params)  # of weights that are made when the runner is
    budget = pool_bytes(config, mesh, lambda: smallest.largest_temporaries(params), reserved=own)
    # More than every slot at max_len would help nobody but the prefix table.
    most = config.slots * smallest.scheduler.pages_per_row
    found = budget // (smallest.page_bytes + smallest.draft_page_bytes)
    return catalogue_for(pages=most if found >= most else steady_pages(found, least=smallest.scheduler.pages_per_row))


def steady_pages(pages: int, *, least: int) -> int:
    """A few percent less, and nearly always the same at the next start, which finds a little more or less memory free:
    programs are compiled for the pool's pages.  Never under `least` for it."""
    unit = 1 << max(pages.bit_length() - 5, 0)
    return max(pages // unit * unit, min(pages, least))


def max_len_of(config: EngineConfig, model: Decoder) -> int:
    """Raises ValueError when the model's context is shorter than what is asked for."""
    context = model.shape.max_position
    if config.max_len > context:
        raise ValueError(f"max_len={config.max_len} is above the model's context of {context}")
    return config.max_len or min(context, DEFAULT_MAX_LEN)


def catalogue_of(
    config: EngineConfig, *, model: Decoder, draft: Draft | None, mesh: Mesh, backend: str, pages: int | None = None
) -> Catalogue:
    """The programs for a pool of this many pages; None = the fewest that hold one sequence of max_len."""
    max_len, shapes = max_len_of(config, model), verify_shapes(config)
    draft = draft if shapes else None
    scheduler = SchedulerConfig(
        slots=config.slots,
        page_size=config.page_size,
        num_pages=1 + (-(-max_len // config.page_size) if pages is None else pages),  # page 0 is scrap
        max_len=max_len,
        queue_limit=config.queue_limit + config.slots,
        prefix_reuse=config.prefix_reuse,
        max_decode_wait=config.max_decode_wait,
        decode_buckets=decode_buckets(config),
        prefill_buckets=prefill_buckets(config, max_len),
        num_drafts=max([drafts for _, drafts in shapes], default=0),
        verify_shapes=shapes,
        has_draft_pool=isinstance(draft, SecondModel),
        is_adaptive=config.fixed_drafts is None,
        is_lookup=draft is not None and draft.is_lookup,
        batch_invariant=config.batch_invariant,
    )
    return Catalogue.of(model, scheduler, config, mesh=mesh, backend=backend, draft=draft)


def pool_bytes(config: EngineConfig, mesh: Mesh, temporaries: Callable[[], int], *, reserved: int = 0) -> int:
    """What `--pool auto` may take on each device: on cpu a stated share of the RAM that is available, elsewhere a share
    of what weights and the largest program's temporaries leave.  reserved: bytes that will be taken before the pool is."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return int(max(_available_ram() - reserved, 0) * config.cpu_pool_fraction)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(f"{device.device_kind} does not tell its memory: name the pool's tokens with --pool")
    left = stats["bytes_limit"] - stats["bytes_in_use"] - temporaries() - reserved
    if left <= 0:
        gib = stats["bytes_limit"] / 2**30
        raise ValueError(f"the weights and the programs' temporaries leave no room for a KV pool in {gib:.1f} GiB")
    return int(left * config.memory_fraction)


def _available_ram() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _tell(console: Console, runner: Runner, info: ModelInfo, scheduler: SchedulerConfig, *, reason: str,
          loading: float, warming: float, misses: int) -> None:  # fmt: skip
    table = Table("program", "trace s", "compile s", "temp MiB", title="compiled programs")
    for program in runner.programs.infos:
        cells = (program.trace_seconds, program.compile_seconds, program.temp_bytes / 2**20)
        table.add_row(program.name, *(f"{cell:.2f}" for cell in cells))
    console.print(table)
    fit = scheduler.pool_tokens // scheduler.max_len
    draft_mib = runner.catalogue.draft_bytes(runner.params) / 2**20
    draft = f", {draft_mib:.0f} MiB of draft weights" if draft_mib else ""
    console.print(
        f"{info.name}: {info.parameters / 1e6:.1f}M parameters, {info.dtype}, on {info.device},"
        f" attention {info.attention_backend} ({reason})\n"
        f"pool: {scheduler.num_pages - 1} pages of {scheduler.page_size} = {scheduler.pool_tokens} tokens in"
        f" {runner.catalogue.kv_dtype},"
        f" {fit} sequences of {scheduler.max_len} fit at once; {scheduler.slots} slots\n"
        f"{_pool_sizes(runner.catalogue)}"
        f"weights {loading:.1f} s{draft}, programs {warming:.1f} s ({misses} compiled, the rest from the cache)"
    )


def _pool_sizes(catalogue: Catalogue) -> str:
    """Of both pools, when the draft has its own."""
    if not catalogue.second:
        return ""
    mib = catalogue.scheduler.num_pages / 2**20
    return (
        f"on each device the pool takes {catalogue.page_bytes * mib:.0f} MiB and the draft's, in pages of the same ids,"
        f" {catalogue.draft_page_bytes * mib:.0f} MiB\n"
    )
