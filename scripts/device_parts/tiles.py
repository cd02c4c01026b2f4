"""Part `tiles`: tries block sizes of the attention kernels and writes the fastest to `pallas_kernels/tiles/<device>.json`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError

import pallas_kernels
from pallas_kernels import IMPLEMENTATIONS
from pallas_kernels.tiles import Phase, Tiles, file_name

from . import PLATFORM_BACKENDS, Report
from .cases import MODELS, Problem
from .measure import seconds_per_call

FOLDER = Path(pallas_kernels.__file__).parent / "tiles"
# backend -> phase -> name -> sizes to try, all combinations of them
CANDIDATES: Mapping[str, Mapping[Phase, Mapping[str, Sequence[int]]]] = {
    "pallas_tpu": {
        "decode": {"pages_per_block": (2, 4, 8, 16, 32)},
        "prefill": {"queries_per_block": (64, 128, 256), "pages_per_block": (4, 8, 16)},
    },
    "pallas_triton": {
        "decode": {"block": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
        "prefill": {"queries_per_block": (16, 32), "block": (32, 64), "num_stages": (2, 3)},
    },
    "pallas_mosaic_gpu": {"decode": {"block": (64, 128)}, "prefill": {"block": (64, 128), "warpgroups": (1, 2)}},
}
WORK: Mapping[Phase, tuple[int, list[int]]] = {  # phase -> queries, contexts
    "decode": (1, [4096] * 64),
    "prefill": (512, [4096] * 4),
}


def run(device: jax.Device, quick: bool) -> Report:  # pyright: ignore[reportInvalidTypeForm]
    report = Report("block sizes, fastest of those tried", ("backend", "phase", "defaults us", "best us", "tiles"))
    path = FOLDER / file_name(device.device_kind)
    found = json.loads(path.read_text()) if path.is_file() else {}
    for backend in PLATFORM_BACKENDS[device.platform]:
        if backend not in IMPLEMENTATIONS["paged_attention"]:
            continue
        for phase, candidates in CANDIDATES.get(backend, {}).items():
            queries, lengths = WORK[phase]
            problem = Problem.random(MODELS["llama3-8b"], lengths, queries=queries, page_size=64, dtype="bfloat16")
            default = seconds_per_call(problem.function(backend), *problem.arrays, calls=5)
            best, tiles = default, None
            for choice in _combinations(candidates):
                try:
                    seconds = seconds_per_call(problem.function(backend, choice), *problem.arrays, calls=5)
                except (ValueError, JaxRuntimeError):  # too large for the chip, or not a shape the kernel has
                    continue
                if seconds < best:
                    best, tiles = seconds, choice
            report.rows.append((backend, phase, default * 1e6, best * 1e6, json.dumps(tiles)))
            if tiles is not None:
                found.setdefault("paged_attention", {}).setdefault(backend, {})[phase] = tiles
    if found and not quick:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    return report


def _combinations(candidates: Mapping[str, Sequence[int]]) -> Iterator[Tiles]:
    for sizes in itertools.product(*candidates.values()):
        yield dict(zip(candidates, sizes, strict=True))
