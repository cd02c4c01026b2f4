"""Ends a process that hangs: the engine's thread, the event loop, or native code that keeps the GIL.

The timer is faulthandler's own thread, in C: it needs neither the GIL nor the event loop.  It is set anew whenever the
engine's loop has gone round and the event loop has seen it.  When that stays away, the stacks of all threads go to
stderr and the process exits with code 1.  It runs once an engine is attached: compiling at the start cannot trip it."""

from __future__ import annotations

import asyncio
import faulthandler
import sys

from server.backend import Backend

LOOK_SECONDS = 0.5


async def watch_over(backend: Backend, seconds: float) -> None:
    """Until cancelled; then the timer is off."""
    seen = None
    try:
        while True:
            if backend.beat != seen:
                seen = backend.beat
                faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        faulthandler.cancel_dump_traceback_later()
