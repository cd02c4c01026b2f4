"""The CUDA compiler's word on a program: its memory, and its kernels' registers and instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.compilers.harness import run_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    entry: str
    registers: int  # a thread
    spilled_bytes: int
    wgmma: int  # instructions in its text
    mma: int
    tma_loads: int
    threads: int  # a program
    registers_asked: tuple[int, ...]  # by warpgroups, of those that the program started with


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    name: str
    argument_bytes: int
    temp_bytes: int
    hlo: str  # after all of XLA's passes
    kernels: tuple[Kernel, ...]

    def kernel(self, entry: str) -> Kernel:
        (found,) = [kernel for kernel in self.kernels if kernel.entry == entry]
        return found


def compile_for_h200(module: str, names: Sequence[str]) -> dict[str, Report]:
    """Reports by name, of `module.program(name)`.  Skips the test where the compiler is absent."""
    reports = [_report(line) for line in run_worker("tests.kernels.cuda_worker", module, *names, platform="cuda")]
    return {report.name: report for report in reports}


def _report(line: dict) -> Report:
    kernels = tuple(
        Kernel(**(kernel | {"registers_asked": tuple(kernel["registers_asked"])})) for kernel in line["kernels"]
    )
    return Report(**(line | {"kernels": kernels}))
