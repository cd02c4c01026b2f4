"""What the real CUDA compiler makes of the quantised matmul on an H200: no spilled register, no weight written wide."""

from __future__ import annotations

import re

import pytest

from tests.kernels.cuda import Report, compile_for_h200
from tests.kernels.quant_programs import SIDES

MODULE = "tests.kernels.quant_programs"


def assert_lean(name: str, report: Report) -> None:
    side, values, _, _, rows = name.split("-")
    inputs, outputs = SIDES[side]
    kernel = report.kernel("quant_matmul")
    assert kernel.spilled_bytes == 0, kernel
    assert (kernel.mma if int(rows) <= 16 else kernel.wgmma) > 0, kernel
    # Partial sums of the splits are all the memory it may take; the weight's own bytes arrive once, as a parameter.
    weight_bytes = inputs * outputs * {"int4": 4, "int8": 8}[values] // 8
    assert report.temp_bytes < weight_bytes / 3
    shaped = re.findall(rf"= \w+\[{inputs},{outputs}\]\S* (\S+)\(", report.hlo)
    assert set(shaped) == {"parameter"}, shaped
    assert report.argument_bytes > weight_bytes
    assert report.argument_bytes < weight_bytes * 2 + int(rows) * inputs * 4


def test_a_decode_step_reads_int4_as_it_lies() -> None:
    name = "down-int4-128-bfloat16-16"
    assert_lean(name, compile_for_h200(MODULE, [name])[name])


@pytest.mark.full
@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize("side", SIDES)
def test_every_group_dtype_and_number_of_rows_compiles_without_spills_or_copies(side: str, x: str) -> None:
    names = [
        f"{side}-{values}-{group}-{x}-{rows}"
        for values in ("int4", "int8")
        for group in (32, 64, 128)
        for rows in (1, 17, 64, 4000)
    ]
    for name, report in compile_for_h200(MODULE, names).items():
        assert_lean(name, report)
