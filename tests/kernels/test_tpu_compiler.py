"""The TPU kernel under the real TPU compiler, ahead of time, on a machine without a TPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.compilers.harness import run_worker
from tests.kernels.tpu_worker import SHAPES, TOPOLOGIES

IN_PLAIN_RUN = ("v6e", "llama3_8b_long_table")


def compile_shapes(device: str, names: Sequence[str]) -> list[dict]:
    return run_worker("tests.kernels.tpu_worker", device, *names, platform="tpu")


def check(facts: dict) -> None:
    """One kernel call, counted in flops, and nothing of the pool's size beside the pool."""
    assert facts["kernel_calls"] == 1, facts
    assert facts["flops"] > 0, facts
    smallest = min(facts["pool_bytes"], facts["scale_bytes"] or facts["pool_bytes"])
    assert facts["temp_bytes"] < smallest / 2, facts
    assert facts["largest_result_bytes"] < smallest / 2, facts


def test_the_kernel_compiles_and_copies_no_pool() -> None:
    device, name = IN_PLAIN_RUN
    (facts,) = compile_shapes(device, (name,))
    check(facts)


@pytest.mark.full
@pytest.mark.parametrize("device", TOPOLOGIES)
def test_every_shape_compiles_on_every_device_and_copies_no_pool(device: str) -> None:
    facts = compile_shapes(device, list(SHAPES))
    assert [fact["name"] for fact in facts] == list(SHAPES)
    for fact in facts:
        check(fact)
