"""The CUDA compiler's word on a program: its memory, and its kernels' registers and instructions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest


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
    argument_bytes: int
    temp_bytes: int
    hlo: str  # after all of XLA's passes
    kernels: tuple[Kernel, ...]

    def kernel(self, entry: str) -> Kernel:
        (found,) = [kernel for kernel in self.kernels if kernel.entry == entry]
        return found


def _kernel(*, registers_asked: list[int], **facts) -> Kernel:
    return Kernel(registers_asked=tuple(registers_asked), **facts)


def compile_for_h200(module: str, names: Sequence[str]) -> dict[str, Report]:
    """Reports by name, of `module.program(name)`.  Skips the test where the compiler is absent."""
    compilers = os.environ.get("JAXSERVE_COMPILERS")
    folder = Path(compilers or ".") / f"cuda-{jax.__version__}"
    if not compilers or not folder.is_dir():
        pytest.skip(f"no CUDA compiler: JAXSERVE_COMPILERS must name the folder that holds cuda-{jax.__version__}")
    if shutil.which("ptxas") is None:
        pytest.skip("no ptxas on the PATH")
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))
    }
    env |= {"PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[2]}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.kernels.cuda_worker", module, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        line.pop("name"): Report(**(line | {"kernels": tuple(_kernel(**kernel) for kernel in line["kernels"])}))
        for line in lines
    }
