"""The Triton kernel under the real CUDA compiler, ahead of time for an H200, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from tests.kernels.gpu_worker import ROOT, SHAPES, Facts, compiler_environment

IN_PLAIN_RUN = "llama3"
SHARED_BYTES = 227 * 1024  # of a processor; what two programs take together must fit
WIDE_ROWS = 64  # rows of a matmul that wgmma takes


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The CUDA plugin from $JAXSERVE_COMPILERS/cuda-<jax version>."""
    folder = Path(os.environ.get("JAXSERVE_COMPILERS", "")) / f"cuda-{jax.__version__}"
    if "JAXSERVE_COMPILERS" not in os.environ or not folder.is_dir():
        pytest.skip(f"no CUDA compiler: JAXSERVE_COMPILERS must name the folder that holds cuda-{jax.__version__}")
    if shutil.which("ptxas") is None:
        pytest.skip("no ptxas on the PATH")
    return compiler_environment(folder)


def compile_shapes(names: Sequence[str], environment: dict[str, str]) -> list[Facts]:
    command = [sys.executable, "-m", "tests.kernels.gpu_worker", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [Facts(**json.loads(line)) for line in done.stdout.splitlines()]


def check(facts: Facts) -> None:
    shape = SHAPES[facts.name]
    assert facts.spilled_bytes == 0, facts
    assert facts.temp_bytes < facts.pool_bytes / 64, facts  # partials of split rows, never pages
    assert facts.shared_bytes <= SHARED_BYTES, facts
    if shape.queries * shape.heads // shape.kv_heads < WIDE_ROWS:
        assert facts.shared_bytes <= SHARED_BYTES / 2, facts
    assert facts.copies_of_16, facts
    assert facts.copies_of_8 == 0, facts
    assert facts.copies_of_4 == 0 or shape.pool_dtype, facts  # an 8-bit pool's scales
    # Elements past 2^31 are beyond a signed 32-bit offset.
    assert facts.offset_bits == (64 if facts.pool_bytes > 2**32 else 32), facts
    if shape.dtype == "float32":
        assert facts.tf32 == facts.mma == facts.wgmma == 0, facts
    elif shape.queries * shape.heads // shape.kv_heads >= WIDE_ROWS:
        assert facts.wgmma, facts
    else:
        assert facts.mma, facts


def test_decode_spills_nothing_and_reads_pages_in_wide_copies(environment: dict[str, str]) -> None:
    (facts,) = compile_shapes([IN_PLAIN_RUN], environment)
    check(facts)


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama3", "qwen3", "gemma2", "gemma3", "smollm2"])
def test_every_shape_spills_nothing_and_copies_no_pool(model: str, environment: dict[str, str]) -> None:
    names = [name for name in SHAPES if name.startswith(model)]
    facts = compile_shapes(names, environment)
    assert [fact.name for fact in facts] == names
    for fact in facts:
        check(fact)
