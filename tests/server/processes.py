"""Whole processes: the serving one around the stub engine, and the scripts as a user runs them."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


def script(name: str, *arguments: str, stdin: str | None = None, timeout: float = 30) -> subprocess.CompletedProcess:
    """Run scripts/NAME to its end, from another folder than the repository."""
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout, cwd="/", env=ENVIRONMENT
    )


def start(command: Sequence[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )


def read_until(stream, words: str, seconds: float = 15) -> str:
    """Everything the process has written, up to these words."""
    end = time.monotonic() + seconds
    text = ""
    while words not in text:
        assert time.monotonic() < end, f"{words!r} did not come; got {text!r}"
        if select.select([stream], [], [], 0.1)[0]:
            part = os.read(stream.fileno(), 65536).decode()
            assert part, f"the process ended without {words!r}: {text!r}"
            text += part
    return text


@dataclass(frozen=True)
class Serving:
    """A process that serves, and where."""

    process: subprocess.Popen
    grpc: str
    http: str  # base URL


@contextmanager
def serving_process(*stub_flags: str, flags: Sequence[str] = ()) -> Iterator[Serving]:
    """The serving process around the stub engine, once it serves."""
    ports = ["--port", "0", "--http-port", "0"]
    process = start(["-m", "tests.server.run_stub", *stub_flags, "--", *ports, *flags])
    try:
        text = read_until(process.stderr, "answers gRPC on ")
        while not (found := re.search(r"answers gRPC on (\S+), HTTP on (\S+)\n", text)):
            text += read_until(process.stderr, "\n")
        yield Serving(process, found[1], found[2])
    finally:
        process.kill()
        process.communicate()


@contextmanager
def stub_server(*stub_flags: str, flags: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen, str]]:
    """-> the process and its gRPC address, once it serves."""
    with serving_process(*stub_flags, flags=flags) as serving:
        yield serving.process, serving.grpc
