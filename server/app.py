"""The service as a whole: both fronts, their health, and how they follow one engine's life.

Knows no signals and no process: `server.main` does, and tests start an App in their own event loop on port 0."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from server.args import MIB, ServerConfig
from server.backend import Backend
from server.calls import Calls
from server.grpc_service import GenerationService
from server.http_api import http_app
from server.http_server import HttpServer
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc

log = logging.getLogger("jaxserve")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Generation"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

PING_INTERVAL_MS = 5_000  # clients may ping this often (they usually do every 10 s), streams open or not
WATCH_SECONDS = 0.25
FLUSH_SECONDS = 5.0  # for the last messages of streams whose readers are slow
STUCK_SECONDS = 10.0  # past the drain's own timeout; then the loop hangs and is left behind

Result = TypeVar("Result")


def channel_options(config: ServerConfig, *, ping_interval_ms: int = PING_INTERVAL_MS) -> list[tuple[str, int]]:
    """Stated message limits, and keepalive that neither idle clients nor gateways trip over."""
    return [
        ("grpc.max_receive_message_length", config.max_message_mb * MIB),
        ("grpc.max_send_message_length", config.max_message_mb * MIB),
        ("grpc.so_reuseport", 0),  # else a second server shares the port in silence
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", ping_interval_ms),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.keepalive_time_ms", 60_000),  # our own pings find the peers that vanished without a word
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where the fronts listen; http None = there is none."""

    grpc: int
    http: int | None


class App:
    """`start` (answers, NOT_SERVING), `attach` an engine (SERVING), `stop` (drain).  One use each."""

    def __init__(self, config: ServerConfig, *, options: list[tuple[str, int]] | None = None):
        self._config = config
        self._server = grpc.aio.server(options=options or channel_options(config))
        self._calls = Calls(config)
        self._http = HttpServer(http_app(self._calls)) if config.http_port >= 0 else None
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)
        self._backend: Backend | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()
        pb_grpc.add_GenerationServicer_to_server(GenerationService(self._calls), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> Ports:
        """Listens.  ValueError when it cannot."""
        _check_address(self._config.host, self._config.port)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        try:
            port = self._server.add_insecure_port(f"{host}:{self._config.port}")
        except RuntimeError as error:
            raise ValueError(f"cannot listen on {host}:{self._config.port} ({error})") from None
        http_port = None
        if self._http is not None:
            http_port = await self._http.start(self._config.host, self._config.http_port)
        await self._set_health(NOT_SERVING)
        await self._server.start()
        return Ports(grpc=port, http=http_port)

    async def attach(self, backend: Backend) -> None:
        """Serve with this engine, which is warm and started."""
        self._backend = backend
        self._calls.attach(backend)
        await self._set_health(SERVING)
        self._watcher = asyncio.create_task(self._watch(backend))

    async def failed(self) -> None:
        """Returns when the engine's loop has died; health says NOT_SERVING by then."""
        await self._failed.wait()

    async def stop(self, drain_timeout: float) -> bool:
        """Refuse new work, let running requests finish for `drain_timeout` seconds, abort the rest, close.
        False when the engine's loop would not end."""
        await self._health.enter_graceful_shutdown()
        if self._watcher is not None:
            self._watcher.cancel()
        has_ended = True
        if self._backend is not None:
            stopping = in_thread(lambda backend=self._backend: backend.stop(drain_timeout))
            has_ended = bool((await asyncio.wait({stopping}, timeout=drain_timeout + STUCK_SECONDS))[0])
            if has_ended:
                stopping.result()
        await self._flush()
        if self._http is not None:
            await self._http.stop(0.5)
        await self._server.stop(0.5)
        self._calls.close()
        return has_ended

    async def _flush(self) -> None:
        """Waits for calls whose last messages are on their way (a health watcher's call never ends by itself)."""
        end = asyncio.get_running_loop().time() + FLUSH_SECONDS
        while self._calls.open_calls and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)

    async def _watch(self, backend: Backend) -> None:
        """Health follows the engine: it beats from the loop, so a hung loop is seen too."""
        was_healthy = True
        while True:
            is_healthy = backend.is_healthy
            if is_healthy != was_healthy:
                log.warning("health: %s", "the engine beats again" if is_healthy else "the engine does not beat")
                await self._set_health(SERVING if is_healthy else NOT_SERVING)
                was_healthy = is_healthy
            if backend.failure is not None:
                self._failed.set()
                return
            await asyncio.sleep(WATCH_SECONDS)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)


def in_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """`work` in a daemon thread of its own: one that hangs keeps no process alive (an executor's would)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        try:
            outcome = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:  # the event loop is closed: nobody waits any more
            return

    threading.Thread(target=run, name="jaxserve-work", daemon=True).start()
    return future


def _check_address(host: str, port: int) -> None:
    """gRPC only says that it failed to bind; the operating system says why."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        reason = f"{error.strerror} (choose with --host and --port)"
        raise ValueError(f"cannot listen on {host} port {port}: {reason}") from None
