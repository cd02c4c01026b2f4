"""Programs on disk: taken whole, never the wrong one, and nothing that happens to the folder stops a start."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import shelf as shelf_module
from jaxserve.programs import Programs
from jaxserve.shelf import SOURCES, Shelf
from tests.test_floors import MODULES, ROOT, imports
from tests.tiny_model import write_tiny_model

NUMBERS = np.arange(8, dtype=np.float32)
START = """
import json, sys
from jaxserve import LLM, SamplingParams
from jaxserve.programs import compile_counter
with LLM(model=sys.argv[1], compile_cache=sys.argv[2], accelerator="cpu", slots=2, pool="1024", prefill_chunk=32) as llm:
    output, = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    traced = [info.name for info in llm.engine._runner.programs.infos if info.trace_seconds]
    print(json.dumps([traced, compile_counter().cache_misses, list(output.token_ids)]))
"""


def a_shelf(folder: Path, *, catalogue: str = "a catalogue", devices: int = 1) -> Shelf:
    made = Shelf.of(catalogue, folder, jax.devices()[:devices])
    assert made is not None
    return made


def run(
    shelf: Shelf | None, traces: list[str], *, name: str = "scale", factor: float = 2.0, size: int = 8
) -> np.ndarray:
    """One program, compiled or taken, and run; it notes when it is traced."""

    def scale(x):
        traces.append(name)
        return {"scaled": x * factor}

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    programs = Programs(shelf)
    programs.compile({name: (jax.jit(scale), (jax.ShapeDtypeStruct((size,), jnp.float32, sharding=place),))})
    return np.asarray(programs[name](jnp.arange(size, dtype=jnp.float32))["scaled"])


def test_what_was_compiled_is_taken_and_not_traced_again(tmp_path: Path) -> None:
    traces: list[str] = []
    first = run(a_shelf(tmp_path), traces)
    second = run(a_shelf(tmp_path), traces)
    assert traces == ["scale"]
    np.testing.assert_array_equal(first, 2 * NUMBERS)
    np.testing.assert_array_equal(second, 2 * NUMBERS)


@pytest.mark.parametrize("changed", ["name", "arguments", "catalogue", "sources", "settings", "cores", "device count"])
def test_a_program_of_another_variant_is_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    traces: list[str] = []
    run(a_shelf(tmp_path), traces)
    catalogue, name, size = "a catalogue", "scale", 8
    match changed:
        case "name":
            name = "another"
        case "arguments":
            size = 9
        case "catalogue":
            catalogue = "another catalogue"
        case "sources":
            monkeypatch.setattr(shelf_module, "_sources", lambda: "other sources")
        case "settings":
            monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_min_max=false")
        case "cores":
            monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(97), raising=False)
        case "device count":
            monkeypatch.setattr(jax, "device_count", lambda: 97)
    factor = 3.0  # so that taking the old one would show
    found = run(a_shelf(tmp_path, catalogue=catalogue), traces, name=name, factor=factor, size=size)
    np.testing.assert_array_equal(found, factor * np.arange(size))
    assert len(traces) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "another pickle"])
def test_a_broken_file_is_told_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    traces: list[str] = []
    run(a_shelf(tmp_path), traces)
    (file,) = tmp_path.glob("*.program")
    whole = file.read_bytes()
    middle = len(whole) // 2
    data, reason = {
        "cut": (whole[:-100], "it is not what was written"),
        "changed": (whole[:middle] + b"?" * 100 + whole[middle + 100 :], "it is not what was written"),
        "empty": (b"", "it is not what was written"),
        "another pickle": (shelf_module.sealed(b"cnothing\nlike_it\n."), "No module named 'nothing'"),
    }[damage]
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        np.testing.assert_array_equal(run(a_shelf(tmp_path), traces), 2 * NUMBERS)
    assert "'scale'" in caplog.text and file.name in caplog.text and reason in caplog.text
    np.testing.assert_array_equal(run(a_shelf(tmp_path), traces), 2 * NUMBERS)
    assert traces == ["scale"] * 2


def test_a_full_disk_is_told_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        np.testing.assert_array_equal(run(a_shelf(tmp_path), []), 2 * NUMBERS)
    assert "No space left" in caplog.text
    assert not list(tmp_path.iterdir())


def test_the_programs_that_nobody_took_the_longest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[str] = []
    for age, name in enumerate(("new", "middle", "old")):
        run(a_shelf(tmp_path), traces, name=name)
        for file in tmp_path.glob("*.program"):
            if file.stat().st_mtime > 1e9:
                os.utime(file, (1e9 - age, 1e9 - age))
    run(a_shelf(tmp_path), traces, name="old")  # taken: from now on the newest
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    monkeypatch.setattr(shelf_module, "MOST_BYTES", 3 * size)
    run(a_shelf(tmp_path), traces, name="one more")
    traces.clear()
    for name in ("new", "old", "one more", "middle"):
        run(a_shelf(tmp_path), traces, name=name)
    assert traces == ["middle"]


def test_without_a_folder_there_is_no_shelf() -> None:
    assert Shelf.of("a catalogue", None, jax.devices()[:1]) is None


def test_the_sources_are_all_that_a_catalogue_imports() -> None:
    waiting, seen = ["jaxserve.catalogue"], set()
    while waiting:
        module = waiting.pop()
        if module in MODULES and module not in seen and module.startswith(("jaxserve.", "pallas_kernels")):
            seen.add(module)
            waiting += imports(MODULES[module])
    paths = {str(MODULES[module].relative_to(ROOT)) for module in seen}
    lacking = {path for path in paths if not path.startswith(tuple(SOURCES))}
    assert not lacking, f"a change of {sorted(lacking)} would go unnoticed"


@pytest.mark.parametrize("kernels", ["native", "xla"])
def test_a_second_start_traces_and_compiles_nothing_and_says_the_same(tmp_path: Path, kernels: str) -> None:
    if kernels == "native" and importlib.util.find_spec("llvmlite") is None:
        pytest.skip("the native kernels are written with llvmlite, which is not installed")
    model = write_tiny_model(tmp_path / "tiny")
    script = START.replace("slots=2", f'slots=2, matmul_backend="{kernels}", attention_backend="{kernels}"')
    told = []
    for _ in range(2):
        command = [sys.executable, "-c", script, str(model), str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    (traced, compiled, tokens), (traced_again, compiled_again, tokens_again) = told
    assert traced and compiled and len(tokens) == 8
    assert (traced_again, compiled_again, tokens_again) == ([], 0, tokens)
