"""The Triton kernel under the real CUDA compiler, ahead of time for an H200, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.compilers.harness import run_worker
from tests.kernels.gpu_worker import SHAPES, Facts

IN_PLAIN_RUN = "llama3"
SHARED_BYTES = 227 * 1024  # of a processor; what two programs take together must fit
WIDE_ROWS = 64  # rows of a matmul that wgmma takes


def compile_shapes(names: Sequence[str]) -> list[Facts]:
    return [Facts(**facts) for facts in run_worker("tests.kernels.gpu_worker", *names, platform="cuda")]


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


def test_decode_spills_nothing_and_reads_pages_in_wide_copies() -> None:
    (facts,) = compile_shapes([IN_PLAIN_RUN])
    check(facts)


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama3", "qwen3", "gemma2", "gemma3", "smollm2"])
def test_every_shape_spills_nothing_and_copies_no_pool(model: str) -> None:
    names = [name for name in SHAPES if name.startswith(model)]
    facts = compile_shapes(names)
    assert [fact.name for fact in facts] == names
    for fact in facts:
        check(fact)
