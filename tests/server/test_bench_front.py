"""The benchmark of the fronts runs, and tells what it measured."""

from __future__ import annotations

import re

import pytest

from tests.server.processes import script


@pytest.mark.parametrize("front", ["http", "grpc"])
def test_both_measurements_are_told(front: str) -> None:
    result = script("bench_front.py", "--only", front, "--streams", "4", "--seconds", "0.3", timeout=60)
    assert result.returncode == 0, result.stderr
    flood, paced = result.stdout.splitlines()
    assert re.fullmatch(rf"{front} flood: [\d,]+ tok/s in [\d,]+ frames/s \(wanted [\d,]+ tok/s\)", flood)
    assert re.fullmatch(rf"{front} paced: [\d,]+ tok/s to 4 streams, p50 [\d.]+ ms, p99 [\d.]+ ms \(wanted 5\)", paced)
