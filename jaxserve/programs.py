"""Compiled programs by name, and the counters that prove nothing is compiled after the start.

Programs are lowered one after the other (Python) and compiled side by side (the compiler leaves the GIL)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import jax


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """One line of the table printed at start."""

    name: str
    trace_seconds: float
    compile_seconds: float
    temp_bytes: int


@dataclass(slots=True)
class CompileCounter:
    """Counts, from the moment it is registered, what jax compiles in this process and what the persistent cache
    could not serve."""

    compiles: int = 0  # served by the persistent cache or not
    cache_misses: int = 0

    def on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.compiles += 1

    def on_event(self, event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_misses":
            self.cache_misses += 1


@functools.cache
def compile_counter() -> CompileCounter:
    """The process's counter: jax's monitoring is process-wide and keeps its listeners for good."""
    counter = CompileCounter()
    jax.monitoring.register_event_duration_secs_listener(counter.on_duration)
    jax.monitoring.register_event_listener(counter.on_event)
    return counter


Wanted = dict[str, tuple[jax.stages.Wrapped, tuple]]  # name -> (jitted function, abstract arguments)


@dataclass(slots=True)
class Programs:
    """name -> compiled program.  An unknown name is a KeyError: a shape that was not compiled is never run."""

    compiled: dict[str, Callable] = field(default_factory=dict)
    infos: list[ProgramInfo] = field(default_factory=list)

    def compile(self, wanted: Wanted, *, threads: int = 2) -> None:
        with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
            pending = []
            for name, (function, arguments) in wanted.items():
                began = time.perf_counter()
                lowered = function.lower(*arguments)
                pending.append((name, time.perf_counter() - began, pool.submit(_timed_compile, lowered)))
            for name, trace_seconds, future in pending:
                self.compiled[name], seconds = future.result()
                analysis = self.compiled[name].memory_analysis()
                temp_bytes = analysis.temp_size_in_bytes if analysis else 0
                self.infos.append(ProgramInfo(name, trace_seconds, seconds, temp_bytes))

    def __getitem__(self, name: str) -> Callable:
        return self.compiled[name]


def _timed_compile(lowered: jax.stages.Lowered) -> tuple[Callable, float]:
    began = time.perf_counter()
    compiled = lowered.compile()
    return compiled, time.perf_counter() - began
