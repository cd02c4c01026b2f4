"""A request's body: checked by its headers before a byte is read, and never read past the limit."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from server.errors import HttpError

READ_SECONDS = 60.0  # that a client has to send its body


class ClientGone(Exception):
    """Nobody is there to answer."""


async def read_json_body(request: Request, limit: int) -> bytes:
    """The bytes of a JSON body.  HttpError 408, 413 or 415."""
    _check_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 15 or int(declared) > limit):
        raise _too_large(f"{declared[:20]} bytes", limit)
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await _read(request, limit)
    except TimeoutError:
        message = f"the body did not come within {READ_SECONDS:g} seconds"
        raise HttpError(408, message, code="request_timeout", headers={"connection": "close"}) from None


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(f"over {limit} bytes", limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_type(request: Request) -> None:
    """Only JSON, said to be JSON: a web page of another site can send anything else without asking this server."""
    if request.query_params:
        raise HttpError(400, "this path takes no query parameters: say it in the body", code="invalid_argument")
    kind, _, rest = request.headers.get("content-type", "").lower().partition(";")
    if kind.strip() != "application/json":
        raise HttpError(415, "the content-type must be application/json", code="unsupported_media_type")
    charset = rest.replace(" ", "").replace('"', "")
    if charset not in ("", "charset=utf-8"):
        raise HttpError(415, "the body must be UTF-8: leave the charset out", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "the body must not be compressed: no content-encoding", code="unsupported_media_type")


def _too_large(what: str, limit: int) -> HttpError:
    message = f"the body has {what}, this server takes {limit} (its flag --max-message-mb)"
    return HttpError(413, message, code="request_too_large", headers={"connection": "close"})
