"""uvicorn inside an event loop that is not its own: it binds nothing, installs no signal handler, and ends when told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_SECONDS = 75  # longer than the 60 s that proxies keep their connections: theirs ends first
BACKLOG = 2048


class HttpServer:
    """`start`, then `stop`.  One use each."""

    def __init__(self, app: ASGIApp):
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; -> the port.  ValueError when it cannot."""
        listener = _listen(host, port)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)
        return listener.getsockname()[1]

    async def stop(self, seconds: float) -> None:
        """Takes no more connections; those that answer get so many seconds to finish."""
        if self._serving is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait((self._serving,), timeout=seconds)
        if not done:
            self._server.force_exit = True
            for task in list(self._server.server_state.tasks):
                task.cancel()
            await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `server.main` has them


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = f"{error.strerror} (choose with --host and --http-port)"
        raise ValueError(f"cannot listen on {host} port {port}: {reason}") from None
    listener.setblocking(False)
    return listener
