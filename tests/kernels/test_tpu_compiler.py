"""The TPU kernel under the real TPU compiler, ahead of time, on a machine without a TPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.kernels.tpu_worker import SHAPES, TOPOLOGIES, compiler_environment

IN_PLAIN_RUN = ("v6e", "llama3_8b_long_table")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """libtpu from $JAXSERVE_COMPILERS/tpu-<jax version>, or the installed one."""
    folder = Path(os.environ.get("JAXSERVE_COMPILERS", "")) / f"tpu-{jax.__version__}"
    if "JAXSERVE_COMPILERS" in os.environ and folder.is_dir():
        return compiler_environment(folder)
    if importlib.util.find_spec("libtpu"):
        return compiler_environment(None)
    pytest.skip(f"no libtpu: neither $JAXSERVE_COMPILERS/tpu-{jax.__version__} nor an installed one (jaxserve[tpu])")


def compile_shapes(device: str, names: tuple[str, ...], environment: dict[str, str]) -> list[dict]:
    command = [sys.executable, "-m", "tests.kernels.tpu_worker", device, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(facts: dict) -> None:
    """One kernel call, counted in flops, and nothing of the pool's size beside the pool."""
    assert facts["kernel_calls"] == 1, facts
    assert facts["flops"] > 0, facts
    smallest = min(facts["pool_bytes"], facts["scale_bytes"] or facts["pool_bytes"])
    assert facts["temp_bytes"] < smallest / 2, facts
    assert facts["largest_result_bytes"] < smallest / 2, facts


def test_the_kernel_compiles_and_copies_no_pool(environment: dict[str, str]) -> None:
    device, name = IN_PLAIN_RUN
    (facts,) = compile_shapes(device, (name,), environment)
    check(facts)


@pytest.mark.full
@pytest.mark.parametrize("device", TOPOLOGIES)
def test_every_shape_compiles_on_every_device_and_copies_no_pool(device: str, environment: dict[str, str]) -> None:
    facts = compile_shapes(device, tuple(SHAPES), environment)
    assert [fact["name"] for fact in facts] == list(SHAPES)
    for fact in facts:
        check(fact)
