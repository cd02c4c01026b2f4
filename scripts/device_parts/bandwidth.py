"""Part `bandwidth`: keys and values read per second by a decode call of 64 rows, over the copy rate of the same run."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from pallas_kernels import IMPLEMENTATIONS
from pallas_kernels.tiles import tiles_for

from . import PLATFORM_BACKENDS, Report
from .cases import MODELS, Problem
from .measure import copy_bytes_per_second, seconds_per_call

PAGE_SIZE = 64


def contexts(rows: int, quick: bool) -> Iterator[tuple[str, list[int]]]:
    """Equal lengths, and a mix in which a few rows are as long as all the others together."""
    for length in (1024,) if quick else (1024, 4096, 16384):
        yield f"{length} each", [length] * rows
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(64), np.log(512 if quick else 32768), rows)).astype(int)
    yield "64 to 32k, log-uniform" if not quick else "64 to 512, log-uniform", lengths.tolist()


def run(device: jax.Device, quick: bool) -> Report:  # pyright: ignore[reportInvalidTypeForm]
    rows = 4 if quick else 64
    copy = copy_bytes_per_second(megabytes=64 if quick else 1024)
    report = Report(
        f"decode attention, {rows} rows; a copy moves {copy / 1e9:.0f} GB/s",
        ("backend", "model", "contexts", "us", "GB/s", "of a copy"),
    )
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    for backend in PLATFORM_BACKENDS[device.platform]:
        if backend not in IMPLEMENTATIONS["paged_attention"]:
            continue
        tiles = tiles_for(device.device_kind, "paged_attention", backend, "decode")
        for name in ("llama3-8b",) if quick else ("llama3-8b", "qwen3-0.6b", "gemma3"):
            for label, lengths in contexts(rows, quick):
                problem = Problem.random(MODELS[name], lengths, queries=1, page_size=PAGE_SIZE, dtype=dtype)
                try:
                    seconds = seconds_per_call(problem.function(backend, tiles), *problem.arrays)
                except ValueError as refusal:
                    report.rows.append((backend, name, label, "", "", f"refused: {refusal}"))
                    continue
                rate = problem.kv_bytes / seconds
                report.rows.append((backend, name, label, seconds * 1e6, rate / 1e9, rate / copy))
    return report
