"""Runs a worker in a process of its own with a real compiler on its path, because jax finds its compilers when it starts.

A worker is a module that prints one JSON object a line: `tests.compilers.step_worker`, `tests.kernels.*_worker`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from jaxserve.chips import Platform
from jaxserve.chips.compilers import ENVIRONMENT, import_path

ROOT = Path(__file__).parents[2]
TIMEOUT = 900  # seconds


def run_worker(worker: str, *arguments: str, platform: Platform) -> list[dict]:
    """What `python -m <worker>` prints.  Skips, saying why, where the compiler or its assembler is not."""
    try:
        folder = import_path(platform)
    except ValueError as error:
        pytest.skip(str(error))
    if platform == "cuda" and shutil.which("ptxas") is None:
        pytest.skip("no ptxas on the PATH")
    return _run(worker, arguments, platform, str(folder or ""))


@cache
def _run(worker: str, arguments: tuple[str, ...], platform: Platform, folder: str) -> list[dict]:
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # a worker says what to dump
    paths = [str(ROOT), folder, kept.get("PYTHONPATH", "")]
    environment = ENVIRONMENT[platform] | kept | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # a program for an absent device cannot be loaded from it
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip
    command = [sys.executable, "-m", worker, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=TIMEOUT)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
