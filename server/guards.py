"""Both fronts ask for a key: an interceptor for gRPC, a middleware for HTTP.

Health stays open, for probes and load balancers, and so do the files of the page, which asks for the key itself; gRPC's
reflection does not."""

from __future__ import annotations

import json

import grpc
import grpc.aio
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import CODE_KEY, error_body
from server.grpc_handlers import Continuation, with_behaviour
from server.keys import Doors

OPEN_SERVICES = ("/grpc.health.v1.Health/",)
OPEN_PATHS = frozenset({"/health", "/ready"})
PAGE_PATHS = ("/", "/page/")  # static files that hold nothing secret; a browser sends no key when it opens a page
METRICS_PATH = "/metrics"

SENTENCE = "a valid API key is needed: send it as 'authorization: Bearer KEY'"
UNAUTHENTICATED = "unauthenticated"


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """UNAUTHENTICATED unless the call's metadata carries a user's key; decided before a message is read."""

    def __init__(self, doors: Doors):
        self._doors = doors

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        authorization = next((value for key, value in metadata if key == "authorization"), None)
        is_open = handler_call_details.method.startswith(OPEN_SERVICES)
        if is_open or self._doors.open_to_user(authorization if isinstance(authorization, str) else None):
            return handler
        return _refusing(handler)


async def _refuse(_: object, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, SENTENCE, ((CODE_KEY, UNAUTHENTICATED),))


def _refusing(handler: grpc.RpcMethodHandler | None) -> grpc.RpcMethodHandler:
    """A handler of the same kind that refuses.  None: an unknown method, which a stranger need not learn."""
    return with_behaviour(handler or grpc.unary_unary_rpc_method_handler(_refuse), _refuse)


class KeyMiddleware:
    """401 in OpenAI's shape unless the request carries a key that opens its path."""

    def __init__(self, app: ASGIApp, doors: Doors):
        self._app = app
        self._doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        body = json.dumps(error_body(401, SENTENCE, code="invalid_api_key")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS or path == PAGE_PATHS[0] or path.startswith(PAGE_PATHS[1]):
            return True
        authorization = header(scope, b"authorization")
        if path == METRICS_PATH:
            return self._doors.open_to_scraper(authorization)
        return self._doors.open_to_user(authorization)


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that (lower-case) name."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)
