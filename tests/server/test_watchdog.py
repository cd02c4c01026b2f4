"""A process that hangs ends itself, stacks first; one that works, idles or still loads is left alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.server.processes import read_until, start

SCENE = """
import asyncio, ctypes, time
from server.watchdog import watch_over

class Backend:
    beats = True
    @property
    def beat(self):
        return time.monotonic() if self.beats else 0.0

async def main():
    backend = Backend()
    task = asyncio.create_task(watch_over(backend, 1.5))
    await asyncio.sleep(2.5)  # longer than the watchdog waits: all is well
    print("alive", flush=True)
    {hang}

asyncio.run(main())
"""
ENDS = {
    "the engine's loop": "backend.beats = False; await asyncio.sleep(30)",
    "the event loop": "time.sleep(30)",
    "native code that keeps the GIL": "ctypes.PyDLL(None).sleep(30)",
    "called off": "task.cancel(); backend.beats = False; await asyncio.sleep(2)",
}


@dataclass(frozen=True)
class End:
    code: int
    out: str
    error: str


@pytest.fixture(scope="module")
def ends() -> dict[str, End]:
    """Of every scene; they play side by side."""
    processes = {name: start(["-c", SCENE.replace("{hang}", hang)]) for name, hang in ENDS.items()}
    ended = {}
    for name, process in processes.items():
        out, error = process.communicate(timeout=25)
        ended[name] = End(process.returncode, out, error)
    return ended


@pytest.mark.parametrize("hang", [name for name in ENDS if name != "called off"])
def test_whatever_hangs_ends_the_process_with_1_and_every_stack(ends: dict[str, End], hang: str) -> None:
    end = ends[hang]
    assert (end.code, end.out) == (1, "alive\n")
    assert end.error.startswith("Timeout") and "most recent call first" in end.error


def test_a_watchdog_that_is_called_off_bites_nobody(ends: dict[str, End]) -> None:
    assert ends["called off"] == End(0, "alive\n", "")


def test_a_server_that_loads_for_long_is_left_alone_and_one_that_hangs_ends() -> None:
    flags = ["--load-seconds", "3.5", "--hang-after", "0.1"]
    process = start(
        ["-m", "tests.server.run_stub", *flags, "--", "--port", "0", "--http-port", "-1", "--watchdog", "3"]
    )
    try:
        read_until(process.stderr, "answers gRPC on ", seconds=20)
        assert process.wait(15) == 1
        assert "Timeout" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
