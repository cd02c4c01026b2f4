"""The serving process: flags, the engine's load, signals and exit codes.

Exit codes: 0 drained, 1 the engine's loop died or would not end, 2 wrong flags or a model that cannot be served,
130 ended at once by a second Ctrl-C.  jax is imported inside, once the platform is chosen."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from jaxserve.config import EngineConfig
from server.app import App, Ports, in_thread
from server.args import ServerConfig, choose_platform, parse_server_flags
from server.backend import Backend

log = logging.getLogger("jaxserve")

SWITCH_INTERVAL = 2e-4  # seconds; at the default 5 ms the event loop would wait for the engine's thread at every step


def main(argv: Sequence[str] | None = None) -> int:
    engine_config, config = parse_server_flags(argv)
    choose_platform(engine_config.accelerator)
    return run(config, lambda: load(engine_config))


def load(config: EngineConfig) -> Backend:
    """The real engine, warm and started; its start is told on stderr."""
    from rich.console import Console

    from jaxserve.start import load_engine  # imports jax

    engine = load_engine(config, console=Console(stderr=True))
    engine.start()
    return engine


def run(config: ServerConfig, load: Callable[[], Backend]) -> int:
    """Serve until a signal or the engine's end.  -> the exit code."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        return asyncio.run(serve(config, load))
    except ValueError as error:
        log.debug("could not start", exc_info=True)
        print(f"serve: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


async def serve(config: ServerConfig, load: Callable[[], Backend]) -> int:
    signals = Signals()
    app = App(config)
    ports = await app.start()
    loading = in_thread(load)
    if await _first(signals.received(), loading) is not loading:
        leave_now(0)  # nothing was accepted; a compile in a thread cannot be stopped
    try:
        backend = loading.result()
    except BaseException:
        await app.stop(0)
        raise
    await app.attach(backend)
    print(f"jaxserve: {backend.info.name} answers {addresses(config.host, ports)}", file=sys.stderr, flush=True)
    failed = asyncio.ensure_future(app.failed())
    if await _first(signals.received(), failed) is failed:
        await app.stop(drain_timeout=0)
        return 1
    log.info("draining: up to %g s for what runs; Ctrl-C ends at once", config.drain_timeout)
    if not await app.stop(config.drain_timeout):
        log.error("the engine's loop did not end")
        return 1
    return 0 if backend.failure is None else 1


def addresses(host: str, ports: Ports) -> str:
    host = f"[{host}]" if ":" in host else host
    grpc = f"gRPC on {host}:{ports.grpc}"
    return grpc if ports.http is None else f"{grpc}, HTTP on http://{host}:{ports.http}"


async def _first(*waits: Awaitable) -> asyncio.Future:
    """The first to be done, of two or more."""
    futures = [asyncio.ensure_future(wait) for wait in waits]
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    return next(future for future in futures if future in done)


class Signals:
    """SIGTERM or SIGINT asks for a drain; a SIGINT after that ends the process at once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._receive, number)

    async def received(self) -> None:
        await self._event.wait()

    def _receive(self, number: signal.Signals) -> None:
        if self._event.is_set() and number == signal.SIGINT:
            leave_now(130)
        self._event.set()


def leave_now(code: int) -> NoReturn:
    """End without joining threads that may be deep inside a compile."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
