"""Part `kernels`: every attention kernel of this platform against the reference, on the device itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import IMPLEMENTATIONS

from . import PLATFORM_BACKENDS, Report
from .cases import MODELS, Problem

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def run(device: jax.Device, quick: bool) -> Report:  # pyright: ignore[reportInvalidTypeForm]
    report = Report("kernels against the reference", ("backend", "model", "queries", "dtype", "largest error", ""))
    names = ("smollm2", "gemma3") if quick else tuple(MODELS)
    for backend in PLATFORM_BACKENDS[device.platform]:
        if backend not in IMPLEMENTATIONS["paged_attention"]:
            continue
        for name in names:
            for queries in (1, 4, 64):
                for dtype in ("float32", "bfloat16"):
                    lengths = (700, 0, queries, 67, 1024)
                    problem = Problem.random(MODELS[name], lengths, queries=queries, page_size=64, dtype=dtype)
                    try:
                        error = _largest_error(problem, backend)
                    except ValueError as refusal:  # what a kernel says it cannot serve is no failure
                        report.rows.append((backend, name, queries, dtype, "", f"refused: {refusal}"))
                        continue
                    is_right = error <= TOLERANCE[dtype]
                    report.rows.append((backend, name, queries, dtype, error, "ok" if is_right else "WRONG"))
                    if not is_right:
                        report.failures.append(f"{backend} {name} Q={queries} {dtype}: off by {error:.3g}")
    return report


def _largest_error(problem: Problem, backend: str) -> float:
    """NaN counts as infinite."""
    got = jax.jit(problem.function(backend))(*problem.arrays).astype(jnp.float32)
    wanted = jax.jit(problem.function("reference"))(*problem.arrays).astype(jnp.float32)
    error = jnp.max(jnp.abs(got - wanted))
    return float(jnp.where(jnp.isnan(error), jnp.inf, error))
