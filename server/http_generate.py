"""One generate call over HTTP: a whole body, or a stream of server-sent events, written straight to the socket.

A client that goes away ends its call, whatever it waits for: a worker, the queue, a step, or its own slow reading."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.backend import Backend
from server.calls import Calls, Running, submitted
from server.errors import http_error
from server.json_types import load_json
from server.limits import Limits
from server.openai_fields import Kind
from server.openai_response import body_of
from server.openai_schema import Asked, asked_of
from server.openai_stream import Frames, encode, event

log = logging.getLogger("jaxserve")

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx keeps the frames until it has many
]


class GenerateResponse(Response):
    """An ASGI response that runs its call as it is sent.  RequestError before the first byte is the app's to answer;
    after it, it is the stream's last event."""

    def __init__(self, calls: Calls, kind: Kind, raw: bytes):
        super().__init__()
        self._calls = calls
        self._kind: Kind = kind
        self._raw = raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        began = time.monotonic()
        with self._calls.opened() as (backend, limits):
            call_id = secrets.token_hex(16)
            translate = functools.partial(_translate, self._raw, self._kind, call_id, backend, limits, began)
            asked = await self._calls.prepare(call_id, translate)
            if asked.user is not None:
                log.info("%s is of user %r", call_id, asked.user)
            with submitted(asked.requests, backend) as running:
                if asked.stream:
                    await self._stream(asked, backend, running, send)
                else:
                    await self._whole(asked, backend, running, send)

    async def _whole(self, asked: Asked, backend: Backend, running: Running, send: Send) -> None:
        samples = await running.samples()
        created = int(time.time())

        def body() -> bytes:
            made = body_of(asked, samples, model=backend.info.name, created=created, tokenizer=backend.tokenizer)
            return encode(made).encode()

        data = await self._calls.in_worker(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _stream(self, asked: Asked, backend: Backend, running: Running, send: Send) -> None:
        frames = Frames(asked, model=backend.info.name, created=int(time.time()), tokenizer=backend.tokenizer)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async for position, chunk in running:
                if chunk.finish_reason is not None:
                    running.raise_for_status()
                if chunk.prompt_logprobs is None:
                    frame = frames.of(position, chunk)
                else:
                    frame = await self._calls.in_worker(functools.partial(frames.of, position, chunk))
                if frame:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            last = frames.end()
        except Exception as error:
            last = event(http_error(error)[2])
        await send({"type": "http.response.body", "body": last})


def _translate(raw: bytes, kind: Kind, call_id: str, backend: Backend, limits: Limits, now: float) -> Asked:
    return asked_of(
        load_json(raw, "the body"),
        kind,
        request_id=call_id,
        models=model_names(backend),
        tokenizer=backend.tokenizer,
        limits=limits,
        now=now,
    )


def model_names(backend: Backend) -> list[str]:
    """What `model` may say: the name it is listed under, and the reference it was loaded by."""
    return list(dict.fromkeys((backend.info.name, backend.config.model)))


async def unless_gone(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work`; cancels it when the client goes away."""
    answering = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not answering.done():
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
    if not answering.cancelled():
        answering.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
