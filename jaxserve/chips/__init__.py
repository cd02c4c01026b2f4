"""Chips that need not be here: their published numbers, and how many of them a topology's name asks for.

Standard library only: a script reads it before it imports jax.  `chips.json` names the source of every number."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Literal

Platform = Literal["tpu", "cuda"]
EXAMPLES = "v5e:2x4, v6e:2x2, v6e:1, tpu7x:2x2x1, h200:1, h200:4"
MAX_GPUS = 8  # one host, every pair joined by NVLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What its vendor publishes, per chip; of its memory, what a program may use."""

    name: str
    platform: Platform
    devices: int  # jax devices to a chip: they share its memory, its flops and its links
    usable_bytes: int
    memory_bandwidth: float  # bytes a second
    flops: float  # a second, dense bfloat16
    link_bandwidth: float  # bytes a second, one way, over all links to other chips
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Chips of one kind and how they are joined."""

    name: str
    chip: Chip
    bounds: tuple[int, ...]  # chips along each axis; (1,) = one chip

    @property
    def num_devices(self) -> int:
        return math.prod(self.bounds) * self.chip.devices


@functools.cache
def chips() -> dict[str, Chip]:
    text = resources.files("jaxserve.chips").joinpath("chips.json").read_text()
    return {name: Chip(name=name, **numbers) for name, numbers in json.loads(text).items()}


def parse_topology(name: str) -> Topology:
    """ "v6e:2x2" -> four v6e chips in a square.  Raises ValueError with the names there are."""
    kind, _, text = name.partition(":")
    bounds = tuple(int(part) if part.isdigit() else 0 for part in text.split("x"))
    if kind not in chips() or not all(bounds):
        raise ValueError(f"topology {name!r} is not CHIP:SIZE, e.g. {EXAMPLES}; chips: {', '.join(chips())}")
    chip = chips()[kind]
    if chip.platform == "cuda" and (len(bounds) > 1 or math.prod(bounds) > MAX_GPUS):
        raise ValueError(f"topology {name!r}: name the number of GPUs of one host, {kind}:1 to {kind}:{MAX_GPUS}")
    if chip.platform == "tpu" and len(bounds) == 1 and math.prod(bounds) > 1:
        raise ValueError(f"topology {name!r}: say how the {text} chips are joined, e.g. {kind}:2x2")
    return Topology(name=name, chip=chip, bounds=bounds)
