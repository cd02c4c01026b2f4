"""Timing on a device: what one call costs when calls follow each other without the host, and the copy rate to hold it to."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax


def seconds_per_call(function: Callable[..., Array], first: Array, *rest: Array, calls: int = 20) -> float:
    """Median of five runs of one compiled loop in which every call waits for the one before.

    function(first, *rest) -> an array of first's shape and dtype."""

    @jax.jit
    def loop(first, *rest):
        def body(_, carry):
            # 0 * result: the next call depends on this one, and its input stays what it was.
            return carry + (function(carry, *rest) * 0).astype(carry.dtype)

        return lax.fori_loop(0, calls, body, first)

    compiled = loop.lower(first, *rest).compile()
    jax.block_until_ready(compiled(first, *rest))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(compiled(first, *rest))
        times.append(time.perf_counter() - began)
    return sorted(times)[2] / calls


def copy_bytes_per_second(*, megabytes: int) -> float:
    """Bytes read plus bytes written per second by the plainest program there is: x + 1 on a large array."""
    x = jnp.zeros((megabytes * 2**20 // 4,), jnp.float32)
    # The loop's own addition is one more pass over the same array, fused with this one.
    return 2 * x.nbytes / seconds_per_call(lambda x: x + 1, x, calls=10)
