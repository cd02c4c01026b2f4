"""What stands around both fronts: keys, TLS, CORS, records of calls, and the numbers for scrapers."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from server.args import ServerConfig
from server.decoding import DecodingInterceptor
from server.guards import KeyInterceptor, KeyMiddleware
from server.keys import Doors
from server.metrics import Exposition
from server.recording import RecordInterceptor, RecordMiddleware
from server.records import Observer, log_access
from server.tls import Tls
from server.tracing import Tracer


class Operations:
    """Built before anything listens: ValueError, naming the flag, when a file or a package it needs is not there."""

    def __init__(self, config: ServerConfig):
        self.doors = Doors.of(api_key_file=config.api_key_file, metrics_key_file=config.metrics_key_file)
        self.tls = Tls.of(config.tls_cert, config.tls_key, config.tls_client_ca)
        self.exposition = Exposition()
        self._origins = config.origins
        self._tracer = None if config.otlp_endpoint is None else Tracer(config.otlp_endpoint)
        self._observers: list[Observer] = [log_access] if config.access_log else []
        if self._tracer is not None:
            self._observers.append(self._tracer.observe)

    @property
    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """Of the gRPC server, the outermost first."""
        return (RecordInterceptor(self._observers), KeyInterceptor(self.doors), DecodingInterceptor())

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """The HTTP front behind its keys; a browser's preflight carries none and is answered before they are asked for."""
        app = KeyMiddleware(app, self.doors)
        if not self._origins:
            return app
        return CORSMiddleware(
            app, allow_origins=self._origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
        )

    def recorded(self, app: ASGIApp) -> ASGIApp:
        return RecordMiddleware(app, self._observers)

    def close(self) -> None:
        """Sends the spans that wait; takes a few seconds at most."""
        if self._tracer is not None:
            self._tracer.close()
