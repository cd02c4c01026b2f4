"""Does a model fit on chips that are not here, with how large a KV pool, and how fast could a step be?

The engine's own rules (`jaxserve.start`) on the compiler's own numbers, of programs with as large a pool as the engine
would take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.ahead import Described, DoesNotFit, Report, compile_ahead
from jaxserve.catalogue import Catalogue
from jaxserve.chips import Topology
from jaxserve.config import EngineConfig
from jaxserve.device.sharding import local_bytes
from jaxserve.roofline import Roofline, roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Bytes are of one device."""

    usable_bytes: int
    weight_bytes: int
    draft_bytes: int  # of a draft's own weights
    slot_bytes: int
    temp_bytes: int  # of the largest program compiled
    page_bytes: int  # of a draft's own pool, too
    largest_pages: int  # that memory allows
    catalogue: Catalogue  # as the engine would start: its pool holds no more than every slot at max_len
    reports: tuple[Report, ...]
    rooflines: tuple[Roofline, ...]

    @property
    def largest_tokens(self) -> int:
        return self.largest_pages * self.catalogue.scheduler.page_size


def usable_bytes(topology: Topology) -> int:
    """Of one device's memory."""
    chip = topology.chip
    # jax takes a share of a GPU's memory when it starts, and the engine sees no more than that.
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")) if chip.platform == "cuda" else 1.0
    return int(chip.usable_bytes * share / chip.devices)


def size(
    described: Described, topology: Topology, config: EngineConfig, *, length: int, is_all: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Sizing:  # fmt: skip
    """Compile the programs that decide (`is_all`: every one) and draw the conclusions.

    length: tokens of each request, for the time of a step.  Raises DoesNotFit with numbers, or ValueError as the engine
    would at its start."""
    usable, smallest = usable_bytes(topology), described.catalogue(config)
    pages_per_row, page_bytes = smallest.scheduler.pages_per_row, smallest.page_bytes + smallest.draft_page_bytes
    second = smallest.second
    draft_bytes = local_bytes(second.params) if second else smallest.draft_bytes(described.params)
    left = usable - described.weight_bytes - draft_bytes
    most = config.slots * pages_per_row

    def pages_beside(temporaries: int) -> int:
        if config.pool != "auto":
            return -(-int(config.pool) // config.page_size)
        return int((left - temporaries) * config.memory_fraction) // page_bytes

    guess = max(pages_per_row, min(most, pages_beside(0)))
    catalogue = described.catalogue(config, guess)
    names = list(catalogue.wanted(described.params)) if is_all else catalogue.deciding
    try:
        reports = compile_ahead(described, catalogue, names, progress=progress)
    except DoesNotFit:
        if guess == pages_per_row:
            raise
        catalogue = smallest
        reports = compile_ahead(described, catalogue, names, progress=progress)
    temporaries = max(report.temp_bytes for report in reports)
    pages = pages_beside(temporaries)
    if max(report.peak_bytes for report in reports) > usable or pages < pages_per_row:
        raise DoesNotFit(
            _no_room(smallest, weights=described.weight_bytes + draft_bytes, usable=usable, temporaries=temporaries)
        )
    return Sizing(
        usable_bytes=usable,
        weight_bytes=described.weight_bytes,
        draft_bytes=draft_bytes,
        slot_bytes=catalogue.slot_bytes,
        temp_bytes=temporaries,
        page_bytes=page_bytes,
        largest_pages=pages,
        catalogue=described.catalogue(config, min(most, pages)),
        reports=tuple(reports),
        rooflines=_rooflines(described, topology, catalogue, reports, length),
    )


def _no_room(smallest: Catalogue, *, weights: int, usable: int, temporaries: int) -> str:
    gib, scheduler = 2**30, smallest.scheduler
    pool = scheduler.pages_per_row * (smallest.page_bytes + smallest.draft_page_bytes)
    return (
        f"weights {weights / gib:.2f} GiB, temporaries {temporaries / gib:.2f} GiB and a pool for one sequence"
        f" of max_len={scheduler.max_len} ({pool / gib:.2f} GiB) do not fit into the"
        f" {usable / gib:.2f} GiB a device may use: lower --max-len, or split the model over more chips"
    )


def _rooflines(
    described: Described, topology: Topology, catalogue: Catalogue, reports: list[Report], length: int
) -> tuple[Roofline, ...]:
    found = []
    for report in reports:
        kind, _, sizes = report.name.partition(" ")
        if kind not in ("decode", "prefill"):
            continue
        rows, queries = (int(sizes), 1) if kind == "decode" else map(int, sizes.split("x"))
        held = max(queries, min(length, catalogue.scheduler.pool_tokens // rows))  # all rows together fit the pool
        found.append(
            roofline(
                report.name, rows=rows, queries=queries, length=held, catalogue=catalogue,
                windows=described.model.config.windows, params=described.params,
                collectives=report.collectives, chip=topology.chip,
            )
        )  # fmt: skip
    return tuple(found)
