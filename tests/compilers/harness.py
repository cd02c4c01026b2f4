"""Runs a worker in a process of its own with a real compiler on its path, because jax finds its compilers when it starts.

A worker is a module of this folder that prints one JSON object on its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from jaxserve.chips import Platform
from jaxserve.chips.compilers import import_path

ROOT = Path(__file__).parents[2]
TIMEOUT = 900  # seconds


def facts(worker: str, *arguments: str, platform: Platform) -> dict:
    """What `python -m tests.compilers.<worker>` prints.  Skips, saying why, where the compiler is not."""
    try:
        folder = import_path(platform)
    except ValueError as error:
        pytest.skip(str(error))
    return _run(worker, arguments, str(folder or ""))


@cache
def _run(worker: str, arguments: tuple[str, ...], folder: str) -> dict:
    paths = [str(ROOT), folder, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # a program for an absent device cannot be loaded from it
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-m", f"tests.compilers.{worker}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=TIMEOUT)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])
