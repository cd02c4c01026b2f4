"""Where records begin and end: the outermost interceptor of gRPC, the outermost middleware of HTTP.

Probes are not recorded: they would bury everything else."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import cast

import grpc
import grpc.aio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.grpc_handlers import Continuation, behaviour_of, with_behaviour
from server.guards import METRICS_PATH, OPEN_PATHS, OPEN_SERVICES
from server.records import Observer, Record, recorded

UNSAID = 499  # the client was gone before a status was sent, as nginx has it


class RecordInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, observers: Sequence[Observer]):
        self._observers = tuple(observers)

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(OPEN_SERVICES):
            return handler
        metadata = {
            key: value for key, value in handler_call_details.invocation_metadata or () if isinstance(value, str)
        }

        def new() -> Record:
            return Record(
                front="grpc",
                route=method,
                x_request_id=metadata.get("x-request-id", ""),
                traceparent=metadata.get("traceparent", ""),
                tracestate=metadata.get("tracestate", ""),
            )

        return _recording(handler, new, self._observers)


def _recording(
    handler: grpc.RpcMethodHandler, new: Callable[[], Record], observers: Sequence[Observer]
) -> grpc.RpcMethodHandler:
    """The same handler, its calls recorded."""
    inner = behaviour_of(handler)

    async def call(request: object, context: grpc.aio.ServicerContext) -> object:
        with recorded(new(), observers) as record:
            record.status = grpc.StatusCode.CANCELLED.name  # unless it gets to say something else
            try:
                answer = await cast(Awaitable[object], inner(request, context))
                record.status = _status(context)
                return answer
            except grpc.aio.AbortError:
                record.status = _status(context)
                raise

    async def stream(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
        with recorded(new(), observers) as record:
            record.status = grpc.StatusCode.CANCELLED.name
            async for message in cast(AsyncIterator[object], inner(request, context)):
                yield message
            record.status = _status(context)

    return with_behaviour(handler, stream if inspect.isasyncgenfunction(inner) else call)


def _status(context: grpc.aio.ServicerContext) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else grpc.StatusCode.OK.name


class RecordMiddleware:
    def __init__(self, app: ASGIApp, observers: Sequence[Observer]):
        self._app = app
        self._observers = tuple(observers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"] == METRICS_PATH:
            await self._app(scope, receive, send)
            return
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        record = Record(
            front="http",
            route=f"{scope['method']} {scope['raw_path'].decode('latin-1')}",
            traceparent=headers.get(b"traceparent", ""),
            tracestate=headers.get(b"tracestate", ""),
            status=str(UNSAID),
        )

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = str(message["status"])
                sent = dict(message["headers"])
                record.x_request_id = sent.get(b"x-request-id", b"").decode("latin-1")
            await send(message)

        with recorded(record, self._observers):
            await self._app(scope, receive, send_noted)
