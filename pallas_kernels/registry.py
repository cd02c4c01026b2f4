"""Which code serves which operation on which backend: a dict to read, resolved when a backend is chosen.

Nothing here imports an implementation before it is asked for: a TPU kernel's imports never reach a CPU process."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from jax import Array

# operation -> backend -> "module:function".  A new kernel is one file and one line here.
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "paged_attention": {
        "reference": "pallas_kernels.paged_attention.reference:paged_attention",
        "xla": "pallas_kernels.paged_attention.xla:paged_attention",
        "native": "pallas_kernels.paged_attention.native:paged_attention",
        "pallas_tpu": "pallas_kernels.paged_attention.tpu:paged_attention",
        "pallas_triton": "pallas_kernels.paged_attention.gpu:paged_attention",
        "pallas_mosaic_gpu": "pallas_kernels.paged_attention.mosaic_gpu:paged_attention",
    },
    "kv_write": {
        "reference": "pallas_kernels.kv_write.reference:kv_write",
        "xla": "pallas_kernels.kv_write.xla:kv_write",
        "native": "pallas_kernels.kv_write.native:kv_write",
    },
    "panel_matmul": {
        "xla": "pallas_kernels.panel_matmul.xla:panel_matmul",
        "native": "pallas_kernels.panel_matmul.native:panel_matmul",
    },
    "quant_matmul": {
        "reference": "pallas_kernels.quant_matmul.reference:quant_matmul",
        "xla": "pallas_kernels.quant_matmul.xla:quant_matmul",
        "pallas_triton": "pallas_kernels.quant_matmul.gpu:quant_matmul",
    },
}

# What XLA calls by name in this process -> the function that has made it known, and with what.
CUSTOM_CALLS: dict[str, tuple[Callable[..., str], tuple]] = {}


def custom_call(make: Callable[..., str]) -> Callable[..., str]:
    """Wraps a function that makes a custom call known to XLA and returns its name.  Each is made once, and noted for
    processes that meet its name in a program which they have not traced."""

    made: dict[tuple, str] = {}

    @functools.wraps(make)
    def ready(*plan) -> str:
        if plan not in made:
            made[plan] = make(*plan)
            CUSTOM_CALLS[made[plan]] = (ready, plan)
        return made[plan]

    return ready


def implementation(operation: str, backend: str) -> Callable[..., Array]:
    """The function that serves `operation` on `backend`.  ValueError lists what there is."""
    backends = IMPLEMENTATIONS.get(operation)
    if backends is None:
        raise ValueError(f"{operation=} is none of {', '.join(IMPLEMENTATIONS)}")
    if backend not in backends:
        raise ValueError(f"{backend=} does not serve {operation}: known are {', '.join(backends)}")
    module, _, name = backends[backend].partition(":")
    return getattr(importlib.import_module(module), name)
