"""What the real CUDA compiler makes of the Mosaic GPU kernel on an H200: TMA, wgmma, no spilled register, no copy of
the pool."""

from __future__ import annotations

import re
from math import prod

import pytest

from tests.kernels.cuda import Report, compile_for_h200
from tests.kernels.mosaic_programs import HEADS, STEPS, program

MODULE = "tests.kernels.mosaic_programs"


def assert_lean(name: str, report: Report) -> None:
    kernel = report.kernel("paged_attention_mosaic_gpu_kernel")
    assert kernel.spilled_bytes == 0, kernel
    assert kernel.wgmma > 0 and kernel.tma_loads > 0, kernel
    if kernel.registers_asked:  # the fetching warpgroup gives back what the others take
        fetching, computing = kernel.registers_asked
        warpgroups = kernel.threads // 128
        assert fetching + computing * (warpgroups - 1) <= kernel.registers * warpgroups, kernel
    _, (_, pool, *_) = program(name)
    shaped = re.findall(rf"= \w+\[{','.join(map(str, pool.shape))}\]\S* (\S+)\(", report.hlo)
    assert shaped == ["parameter"], shaped
    assert report.temp_bytes < 2 * prod(pool.shape) / 8


def test_a_decode_step_reads_its_pages_where_they_lie() -> None:
    name = "llama3-decode-64"
    assert_lean(name, compile_for_h200(MODULE, [name])[name])


@pytest.mark.full
@pytest.mark.parametrize("model", HEADS)
def test_every_step_and_page_size_compiles_without_spills_or_copies(model: str) -> None:
    names = [f"{model}-{step}-{page_size}" for step in STEPS for page_size in (16, 64, 128)]
    for name, report in compile_for_h200(MODULE, names).items():
        assert_lean(name, report)
