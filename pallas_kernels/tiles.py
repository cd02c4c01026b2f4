"""Block sizes per kind of device: data in `tiles/<device>.json`, measured there by `scripts/device_check.py`.

A file reads {operation: {backend: {phase: {name: size}}}}.  A device without a file, or a phase without an entry, gets
the kernel's own defaults: they are right everywhere and fast nowhere in particular."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

Phase = Literal["decode", "prefill"]
Tiles = Mapping[str, int]

MAX_DECODE_QUERIES = 16  # a row with more queries is a prompt's chunk; verify has K + 1


def phase_of(queries: int) -> Phase:
    """queries: Q, the queries per row that a program was compiled for."""
    return "decode" if queries <= MAX_DECODE_QUERIES else "prefill"


def tiles_for(device_kind: str, operation: str, backend: str, phase: Phase) -> Tiles | None:
    """The measured block sizes; None where nobody has measured.  device_kind as jax spells it ("TPU v6 lite")."""
    return _read(file_name(device_kind)).get(operation, {}).get(backend, {}).get(phase)


def file_name(device_kind: str) -> str:
    """ "NVIDIA H200" -> "nvidia_h200.json"."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


@cache
def _read(name: str) -> dict:
    path = resources.files("pallas_kernels").joinpath("tiles", name)
    return json.loads(path.read_text()) if path.is_file() else {}
