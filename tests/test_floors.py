"""Imports point down only (the house's floor table), and the floors stay free of what they must not know."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "pallas_kernels", "checkpoints", "server", "scripts")

# Module prefix -> floor.  The longest prefix wins; a module may import its own floor and those below.
FLOORS = {
    "server": 9,
    "scripts": 9,
    "jaxserve": 8,  # the package's own names: LLM, SamplingParams
    "jaxserve.llm": 8,
    "jaxserve.sizing": 7,
    "jaxserve.ahead": 7,
    "jaxserve.roofline": 6,
    "jaxserve.start": 7,
    "jaxserve.engine": 6,
    "jaxserve.loop": 6,
    "jaxserve.late": 6,
    "jaxserve.streams": 6,
    "jaxserve.limits": 6,
    "jaxserve.steptimes": 6,
    "jaxserve.runner": 5,
    "jaxserve.catalogue": 5,
    "jaxserve.drafts": 4,
    "jaxserve.draft_model": 4,
    "jaxserve.programs": 5,
    "jaxserve.shelf": 4,
    "jaxserve.batch": 4,
    "jaxserve.metrics": 4,
    "jaxserve.sched": 3,
    "jaxserve.text": 3,
    "jaxserve.models": 3,
    "jaxserve.device": 2,
    "jaxserve.quant": 1,
    "jaxserve.buckets": 1,
    "jaxserve.request": 0,
    "jaxserve.constraints": 0,
    "jaxserve.errors": 0,
    "jaxserve.config": 0,
    "jaxserve.chips": 0,
    "checkpoints": 0,
    "pallas_kernels": 0,
}
HOST = (
    "jaxserve.sched", "jaxserve.text", "jaxserve.request", "jaxserve.constraints", "jaxserve.errors", "jaxserve.config",
    "jaxserve.buckets", "jaxserve.chips", "jaxserve.metrics",
)  # fmt: skip
DEVICE = ("jaxserve.device", "jaxserve.models", "jaxserve.quant", "pallas_kernels")
NEVER = {"torch", "transformers"}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Every module named by an import, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            dotted = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in dotted}
    return names


def floor(module: str) -> int | None:
    prefixes = [prefix for prefix in FLOORS if module == prefix or module.startswith(prefix + ".")]
    return FLOORS[max(prefixes, key=len)] if prefixes else None


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module: str) -> None:
    for name in imports(MODULES[module]):
        if name in MODULES and floor(name) is not None:
            assert floor(name) <= floor(module), (
                f"{module} (floor {floor(module)}) imports {name} (floor {floor(name)})"
            )


@pytest.mark.parametrize("module", MODULES)
def test_floors_know_only_what_they_may(module: str) -> None:
    tops = {name.split(".")[0] for name in imports(MODULES[module])}
    assert not tops & NEVER, f"{module} imports {tops & NEVER}"
    if within(module, HOST):
        assert not tops & {"jax", "jaxlib", "flax"}, f"{module} is of the host: no jax"
    if within(module, DEVICE):
        assert not tops & {"threading", "asyncio", "queue", "concurrent"}, f"{module} is of the device: no threads"
    if within(module, ("checkpoints",)):
        assert not tops & {"jaxserve", "pallas_kernels", "server"}
    if within(module, ("pallas_kernels",)):
        assert not tops & {"jaxserve", "checkpoints", "server"}


def test_import_touches_no_device() -> None:
    code = (
        "import jaxserve, jax; from jax._src import xla_bridge; assert not xla_bridge._backends, 'a device was touched'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
