"""Compiled programs on disk, whole: a start that finds its own there traces nothing.

jax's persistent compile cache keeps what XLA made of a program, and is asked with the program, which must be traced
first: Python's seconds, most of a warm start.  A shelf is asked with what programs follow from: the sources, the
catalogue, the arguments, the versions, the machine.  What it lacks or cannot read is traced and compiled."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax
from jax import Device
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.registry import CUSTOM_CALLS

log = logging.getLogger("jaxserve")

PLATFORMS = ("cpu",)  # where programs from a shelf have been seen to run
# All that a catalogue imports: what a program is may follow from any of it.
SOURCES = (
    "jaxserve/catalogue.py", "jaxserve/config.py", "jaxserve/constraints.py", "jaxserve/device", "jaxserve/errors.py",
    "jaxserve/models", "jaxserve/programs.py", "jaxserve/quant", "jaxserve/request.py", "jaxserve/shelf.py",
    "pallas_kernels",
)  # fmt: skip
MOST_BYTES = 1 << 30  # of all programs on disk; those that nobody took for the longest time go first
SUFFIX = ".program"

_making = threading.Lock()  # a custom call is made once


@dataclass(frozen=True, slots=True)
class Shelf:
    """The programs of one catalogue.  Several processes may use one folder; who writes into it decides what they run."""

    folder: Path
    key: str  # everything that programs follow from, but their arguments
    devices: tuple[Device, ...]  # pyright: ignore[reportInvalidTypeForm]

    @staticmethod
    def of(catalogue: str, folder: Path | None, devices: Iterable[Device]) -> Shelf | None:  # pyright: ignore[reportInvalidTypeForm]
        """catalogue: in words that say all of it.  folder: of the compile cache; None = there is none."""
        devices = tuple(devices)
        if folder is None or devices[0].platform not in PLATFORMS:
            return None
        assert " at 0x" not in catalogue, f"a key must not hold an address: {catalogue}"
        return Shelf(folder, repr((catalogue, _world())), devices)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Programs that are to be put here are compiled inside: jax's own cache is not asked for them.  What XLA has read
        from there it cannot write again (on CPU it leaves functions out)."""
        was_on = jax.config.values["jax_enable_compilation_cache"]
        self._use_compile_cache(False)
        try:
            yield
        finally:
            self._use_compile_cache(was_on)

    @staticmethod
    def _use_compile_cache(is_on: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", is_on)
        compilation_cache.reset_cache()  # else jax asks the setting once in its life

    def take(self, name: str, arguments: tuple) -> jax.stages.Compiled | None:
        """The program, ready to run; None when it is not there."""
        path = self._path(name, arguments)
        try:
            calls, executable, result = pickle.loads(_opened(path.read_bytes()))
            os.utime(path)
            with _making:
                for make, plan in calls:
                    make(*plan)
            trees = jax.tree.structure((arguments, {})), jax.tree.structure(result)
            return serialize_executable.deserialize_and_load(executable, *trees, execution_devices=self.devices)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with it, it can be made anew
            log.warning("the program %r in %s is not used, and compiled again: %s", name, path, error)
            return None

    def put(self, name: str, arguments: tuple, program: jax.stages.Compiled) -> None:
        """Nothing is left behind by a disk that is full or a process that is killed but a warning or a hidden file."""
        path = self._path(name, arguments)
        calls = [CUSTOM_CALLS[call] for call in _custom_calls(program) if call in CUSTOM_CALLS]
        executable, _, result_tree = serialize_executable.serialize(program)
        # A tree's shape travels as a tree of numbers: jax writes none that holds classes of ours.
        data = pickle.dumps((calls, executable, result_tree.unflatten(range(result_tree.num_leaves))))
        whole = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            whole.write_bytes(sealed(data))
            whole.replace(path)
            self._make_room()
        except OSError as error:
            log.warning("the program %r is not kept, and the next start compiles it again: %s", name, error)
            whole.unlink(missing_ok=True)

    def _path(self, name: str, arguments: tuple) -> Path:
        leaves, structure = jax.tree.flatten(arguments)
        said = repr((self.key, name, str(structure), [(str(leaf), str(leaf.sharding)) for leaf in leaves]))
        return self.folder / (hashlib.sha256(said.encode()).hexdigest() + SUFFIX)

    def _make_room(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process makes room too
            files = sorted(
                ((path.stat(), path) for path in self.folder.glob("*" + SUFFIX)), key=lambda f: f[0].st_mtime
            )
            excess = sum(stat.st_size for stat, _ in files) - MOST_BYTES
            for stat, path in files:
                if excess <= 0:
                    return
                path.unlink()
                excess -= stat.st_size


def sealed(data: bytes) -> bytes:
    """With its digest in front: XLA trusts what it is handed."""
    return hashlib.sha256(data).digest() + data


def _opened(data: bytes) -> bytes:
    size = hashlib.sha256().digest_size
    if sealed(data[size:]) != data:
        raise ValueError("it is not what was written")
    return data[size:]


def _custom_calls(program: jax.stages.Compiled) -> Sequence[str]:
    return sorted(set(re.findall(r'custom_call_target="([^"]+)"', program.as_text() or "")))


def _world() -> tuple:
    """What stands outside of a catalogue and still decides what a program is."""
    caches = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache")
    settings = {name: value for name, value in jax.config.values.items() if not name.startswith(caches)}
    device = jax.devices()[0]
    return (
        _sources(), platform.python_version(), jax.__version__, _version("jaxlib"), _version("llvmlite"),
        device.device_kind, device.client.platform_version, jax.device_count(), jax.process_count(), _processor(),
        os.environ.get("XLA_FLAGS"), sorted((name, repr(value)) for name, value in settings.items()),
    )  # fmt: skip


@functools.cache
def _sources() -> str:
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for source in SOURCES:
        paths = [root / source] if source.endswith(".py") else sorted((root / source).rglob("*.py"))
        for path in paths:
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> tuple:
    """What the host's CPU can do, and how many of its cores this process may use: XLA compiles for both."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        told = [platform.processor()]
    return platform.machine(), cores, told
