"""Where the compilers of absent chips are found: libtpu, and XLA's CUDA plugin.

Installed beside jax they are used from there; else from the folder that `scripts/get_compilers.py` fills.  To be called
before jax is imported: both are found when jax starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import requires, version
from pathlib import Path

from checkpoints.packaged import cache_folder
from jaxserve.chips import Platform

MODULES: dict[Platform, str] = {"tpu": "libtpu", "cuda": "jax_cuda13_plugin"}
EXTRAS: dict[Platform, str] = {"tpu": "tpu", "cuda": "gpu"}  # of jaxserve
NAMES: dict[Platform, str] = {"tpu": "libtpu", "cuda": "XLA's CUDA plugin"}

ENVIRONMENT: dict[Platform, dict[str, str]] = {
    "tpu": {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process ends on the first one's lock file
        "TPU_SKIP_MDS_QUERY": "1",  # no machine to ask what it is
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # the value does not matter: without one libtpu warns
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    },
    "cuda": {},
}


def compiler_folder(platform: Platform) -> Path:
    """$JAXSERVE_COMPILERS, else the cache folder's "compilers", then "tpu-<version of jax>"."""
    chosen = os.environ.get("JAXSERVE_COMPILERS")
    base = Path(chosen).expanduser() if chosen else cache_folder() / "compilers"
    return base / f"{platform}-{version('jax')}"


def import_path(platform: Platform) -> Path | None:
    """The folder to import the compiler from; None = it is importable as it is.

    Raises ValueError, with what to install, when it is not here."""
    if importlib.util.find_spec(MODULES[platform]) is not None:
        return None
    folder = compiler_folder(platform)
    if not (folder / MODULES[platform]).is_dir():
        raise ValueError(
            f"{NAMES[platform]} for jax {version('jax')} is not here: python scripts/get_compilers.py {platform}, or"
            f" pip install 'jaxserve[{EXTRAS[platform]}]'"
        )
    return folder


def use_compiler(platform: Platform) -> None:
    """Makes the compiler importable and sets what it reads from the environment; jax itself starts on the CPU.

    Raises ValueError, with what to install, when the compiler is not here."""
    folder = import_path(platform)
    if folder is not None:
        sys.path.append(str(folder))
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name, value in ENVIRONMENT[platform].items():
        os.environ.setdefault(name, value)


def requirements(platform: Platform) -> list[str]:
    """What to install for the jax that runs, as its own extras name it.  Raises ValueError when they do not."""
    wanted = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin"}[platform]
    lines = [line.partition(";")[0].strip() for line in requires("jax") or ()]
    found = [line for line in lines if line.startswith(wanted) and "[" not in line]
    if not found:
        raise ValueError(f"jax {version('jax')} names no {wanted} in its metadata")
    pinned = found[0].removeprefix(wanted)
    return [wanted + pinned] + (["jax-cuda13-pjrt" + pinned] if platform == "cuda" else [])
