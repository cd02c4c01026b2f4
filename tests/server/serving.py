"""The real service on a real socket, in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import grpc

from server.app import App, Ports
from server.args import ServerConfig
from server.backend import Backend
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc


class Started(Backend, Protocol):
    """An engine that can be started: the stub, or the real one."""

    def start(self) -> None: ...


@dataclass
class Served:
    app: App
    loop: asyncio.AbstractEventLoop
    address: str
    http: str  # base URL; empty when the HTTP front is off
    channel: grpc.Channel
    stub: pb_grpc.GenerationStub

    def call(self, coroutine, timeout: float = 10):
        """Run in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def drain(self, timeout: float):
        return asyncio.run_coroutine_threadsafe(self.app.stop(timeout), self.loop)


@contextmanager
def serving(
    engine: Started | None, config: ServerConfig | None = None, *, options: list[tuple[str, int]] | None = None
) -> Iterator[Served]:
    """engine None: a server whose model is still loading.  Ports are free ones; no HTTP unless the config asks for it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[App, Ports]:
        asked = config or ServerConfig(http_port=-1)
        app = App(replace(asked, port=0, http_port=min(asked.http_port, 0)), options=options)
        ports = await app.start()
        if engine is not None:
            engine.start()
            await app.attach(engine)
        return app, ports

    app, ports = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    address = f"127.0.0.1:{ports.grpc}"
    http = f"http://127.0.0.1:{ports.http}" if ports.http else ""
    size = ("grpc.max_receive_message_length", 2**30), ("grpc.max_send_message_length", 2**30)
    with grpc.insecure_channel(address, options=size) as channel:
        served = Served(app, loop, address, http, channel, pb_grpc.GenerationStub(channel))
        try:
            yield served
        finally:
            served.drain(0).result(20)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something that another thread does; fail when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
