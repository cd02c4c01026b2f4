"""The parts of `scripts/device_check.py`: each is `run(device, quick) -> Report`, and knows none of the others."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Report:
    """What a part found.  Rows go to the table and to the JSON; any failure makes the check fail."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str | float, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


PLATFORM_BACKENDS = {
    "tpu": ("pallas_tpu", "xla"),
    "gpu": ("pallas_triton", "pallas_mosaic_gpu", "xla"),
    "cpu": ("xla",),
}
