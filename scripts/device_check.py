"""Everything worth knowing of a machine with a chip, in one run of under eight minutes:

    python scripts/device_check.py [--only kernels,bandwidth] [--out device-check]

Parts, in order: `kernels` (each against the reference), `engine` (greedy ids equal the CPU's), `bandwidth` (decode
attention over the copy rate), `step` (a whole 8B step over the copy rate), `tiles` (a sweep of block sizes, written to
pallas_kernels/tiles/).  What a part found is in the folder's JSON as soon as it ends, so `--only` goes on where a run
was cut."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import _path  # noqa: F401  first: it makes the next imports work
import jax
from device_parts import Report
from rich.console import Console
from rich.table import Table

PARTS = ("kernels", "engine", "bandwidth", "step", "tiles")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("device-check"), help="folder of results.json")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script itself; writes no tiles")
    args = parser.parse_args()
    wanted = args.only.split(",")
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        parser.error(f"--only={args.only}: {', '.join(unknown)} is none of {', '.join(PARTS)}")
    console, device = Console(width=140), jax.devices()[0]
    if device.platform == "cpu" and not args.quick:
        parser.error("no accelerator here: the check measures one (--quick tries the script on the CPU)")
    path = args.out / "results.json"
    args.out.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text()) if path.is_file() else {}
    results |= {"device": device.device_kind, "jax": jax.__version__, "python": sys.version.split()[0]}
    console.print(f"{device.device_kind}, jax {jax.__version__}")
    failures: list[str] = []
    for part in (part for part in PARTS if part in wanted):
        began = time.perf_counter()
        report: Report = importlib.import_module(f"device_parts.{part}").run(device, args.quick)
        seconds = time.perf_counter() - began
        console.print(_table(report, f"{part}, {seconds:.0f} s"))
        failures += report.failures
        results[part] = asdict(report) | {"seconds": seconds}
        path.write_text(json.dumps(results, indent=1))
    for failure in failures:
        console.print(f"[red]FAILED[/red] {failure}")
    console.print(f"written to {path}")
    return 1 if failures else 0


def _table(report: Report, caption: str) -> Table:
    table = Table(*report.columns, title=report.title, caption=caption)
    for row in report.rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    return table


if __name__ == "__main__":
    sys.exit(main())
