"""Compiled programs by name, and the counters that prove nothing is compiled after the start.

Those that lie on the shelf are taken from it.  The others are lowered one after the other (Python) and compiled side by
side (the compiler leaves the GIL)."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import jax

from jaxserve.shelf import Shelf


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """One line of the table printed at start."""

    name: str
    trace_seconds: float
    compile_seconds: float  # or to take it from a cache
    temp_bytes: int


@dataclass(slots=True)
class CompileCounter:
    """Counts, from the moment it is registered, what jax compiles in this process."""

    compiles: int = 0  # served by the persistent cache or not
    cache_hits: int = 0

    @property
    def cache_misses(self) -> int:
        return self.compiles - self.cache_hits

    def on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.compiles += 1

    def on_event(self, event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.cache_hits += 1


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

    shelf: Shelf | None = None
    compiled: dict[str, Callable] = field(default_factory=dict)
    infos: list[ProgramInfo] = field(default_factory=list)

    def compile(self, wanted: Wanted, *, threads: int = 2) -> None:
        alone = self.shelf.compiling() if self.shelf else contextlib.nullcontext()
        with alone, ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
            taking = {name: pool.submit(self._take, name, wanted) for name in wanted}
            missing = []
            for name, future in taking.items():
                program, seconds = future.result()
                if program is None:
                    missing.append(name)
                else:
                    self._add(name, program, seconds)
            compiling = []
            for name in missing:
                function, arguments = wanted[name]
                began = time.perf_counter()
                lowered = function.lower(*arguments)
                trace_seconds = time.perf_counter() - began
                compiling.append((name, trace_seconds, pool.submit(self._compile, name, arguments, lowered)))
            for name, trace_seconds, future in compiling:
                self._add(name, *future.result(), trace_seconds=trace_seconds)

    def _take(self, name: str, wanted: Wanted) -> tuple[jax.stages.Compiled | None, float]:
        """-> the program from the shelf, None when it is not there, and the seconds that took."""
        began = time.perf_counter()
        program = self.shelf.take(name, wanted[name][1]) if self.shelf else None
        return program, time.perf_counter() - began

    def _compile(self, name: str, arguments: tuple, lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
        began = time.perf_counter()
        program = lowered.compile()
        seconds = time.perf_counter() - began
        if self.shelf:
            self.shelf.put(name, arguments, program)
        return program, seconds

    def _add(self, name: str, program: jax.stages.Compiled, seconds: float, *, trace_seconds: float = 0.0) -> None:
        self.compiled[name] = program
        analysis = program.memory_analysis()
        temp_bytes = analysis.temp_size_in_bytes if analysis else 0
        self.infos.append(ProgramInfo(name, trace_seconds, seconds, temp_bytes))

    def __getitem__(self, name: str) -> Callable:
        return self.compiled[name]
