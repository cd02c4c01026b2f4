"""The device check as a script: what it refuses, and that its parts run where there is no chip."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/device_check.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_an_unknown_part_is_refused_with_the_list() -> None:
    done = run("--only", "kernels,speed")
    assert done.returncode == 2
    assert "speed is none of kernels, engine, bandwidth, step, tiles" in done.stderr


def test_without_a_chip_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "no accelerator here" in done.stderr and "Traceback" not in done.stderr


def test_quick_parts_run_anywhere_and_leave_what_they_found(tmp_path: Path) -> None:
    done = run("--quick", "--only", "bandwidth,step", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["device"] == "cpu"
    for part in ("bandwidth", "step"):
        assert results[part]["rows"] and all(row[-1] > 0 for row in results[part]["rows"])
