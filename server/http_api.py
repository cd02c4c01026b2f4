"""The HTTP front: paths to calls, and every failure to an error in OpenAI's shape.

Routes only: what a body may say is in `openai_fields`, how a call runs in `http_generate`."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.request import ErrorCode, RequestError
from server.calls import Calls
from server.errors import HttpError, http_error
from server.http_body import ClientGone, read_json_body
from server.http_generate import GenerateResponse, model_names
from server.http_text import detokenized, tokenized, tokenizer_info
from server.json_types import quote
from server.limits import MAX_ID_BYTES, HttpLimits
from server.openapi import document

REQUEST_ID = b"x-request-id"


def http_app(calls: Calls) -> ASGIApp:
    """The whole front as one ASGI application."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)  # its own document would know nothing of our bodies
    routes = Routes(calls)
    app.add_api_route("/v1/completions", routes.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", routes.chat_completions, methods=["POST"])
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"])
    app.add_api_route("/tokenize", routes.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", routes.detokenize, methods=["POST"])
    app.add_api_route("/tokenizer_info", routes.tokenizer_info, methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/ready", routes.ready, methods=["GET"])
    app.add_api_route("/openapi.json", routes.openapi, methods=["GET"])
    # The page at / and /metrics are mounted here, after the API's own paths.
    for kind in (RequestError, HttpError, HTTPException, Exception):
        app.add_exception_handler(kind, _failed)
    return RequestIds(app)


class Routes:
    """One small function per path."""

    def __init__(self, calls: Calls):
        self._calls = calls
        self._limits = HttpLimits.of(calls.config)
        self._began = int(time.time())

    async def completions(self, request: Request) -> Response:
        self._calls.accepting()
        return GenerateResponse(self._calls, "completion", await self._body(request))

    async def chat_completions(self, request: Request) -> Response:
        self._calls.accepting()
        return GenerateResponse(self._calls, "chat", await self._body(request))

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        names = model_names(self._calls.ready()[0])
        if name not in names:
            sentence = f"model {quote(name)} is not served here; this is {' or '.join(names)}"
            raise RequestError(sentence, code=ErrorCode.NOT_FOUND, field="model")
        return JSONResponse(self._card())

    async def tokenize(self, request: Request) -> Response:
        backend, limits = self._calls.ready()
        raw = await self._body(request)
        return JSONResponse(await self._calls.in_worker(lambda: tokenized(raw, backend, limits)))

    async def detokenize(self, request: Request) -> Response:
        backend, limits = self._calls.ready()
        raw = await self._body(request)
        return JSONResponse(await self._calls.in_worker(lambda: detokenized(raw, backend, limits)))

    async def tokenizer_info(self) -> Response:
        return JSONResponse(tokenizer_info(self._calls.ready()[0]))

    async def health(self) -> Response:
        """The engine's loop beats: restart the process when this stays away."""
        return _state("healthy", self._calls.is_healthy)

    async def ready(self) -> Response:
        """Send requests here."""
        return _state("ready", self._calls.is_ready)

    async def openapi(self) -> Response:
        return JSONResponse(document())

    async def _body(self, request: Request) -> bytes:
        return await read_json_body(request, self._limits.max_body_bytes)

    def _card(self) -> dict:
        backend, limits = self._calls.ready()
        return {
            "id": backend.info.name,
            "object": "model",
            "created": self._began,
            "owned_by": "jaxserve",
            "max_model_len": backend.info.max_len,
            "limits": asdict(limits) | asdict(self._limits),
        }


def _state(name: str, is_so: bool) -> Response:
    return JSONResponse({"status": name if is_so else f"not {name}"}, status_code=200 if is_so else 503)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # for nobody
    if isinstance(error, HTTPException):  # of the router
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        sentence = f"{request.method} {request.url.path[:100]}: {error.detail}"
        error = HttpError(error.status_code, sentence, code=code, headers=error.headers)
    status, headers, body = http_error(error)
    return JSONResponse(body, status_code=status, headers=headers)


class RequestIds:
    """Echoes the client's x-request-id, or draws one; the engine's own ids are drawn apart from it, so that a proxy's
    second try is no duplicate."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = _sound(dict(scope["headers"]).get(REQUEST_ID, b"")) or secrets.token_hex(16).encode()
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if not has_started:  # else `_failed` has logged and answered it
                raise


def _sound(request_id: bytes) -> bytes:
    """The id, if it is one that may stand in a header and in a log."""
    is_sound = 0 < len(request_id) <= MAX_ID_BYTES and all(33 <= byte <= 126 for byte in request_id)
    return request_id if is_sound else b""
