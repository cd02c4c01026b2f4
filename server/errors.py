"""RequestError codes to protocol statuses: the one place.

Whatever is no RequestError is our own fault: logged with its traceback, told as INTERNAL without it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType

import grpc
import grpc.aio

from jaxserve.request import ErrorCode, RequestError
from server.json_types import Json

log = logging.getLogger("jaxserve")

GRPC_STATUS = {
    ErrorCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
}

HTTP_STATUS = {
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.ALREADY_EXISTS: 409,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE_EXCEEDED: 408,  # the caller's own timeout, so no 5xx
    ErrorCode.CANCELLED: 499,  # as nginx has it; no official status says that the caller ended it
    ErrorCode.INTERNAL: 500,
}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
RETRY_AFTER = {429: "1", 503: "5"}  # seconds: a queue moves fast, a model loads or a server leaves slowly
NO_RETRY = (408, 409, 499)  # statuses that OpenAI's clients would try again, although the same would come of it

CODE_KEY = "jaxserve-code"  # trailing metadata: the status is this server's own word, not the transport's
FIELD_KEY = "jaxserve-field"  # trailing metadata: the field at fault
MAX_MESSAGE_CHARS = 500  # a value may be quoted, a 100 MB value may not; details travel in an HTTP/2 header


def clear_message(error: RequestError) -> str:
    """The error's sentence, cut to a length that every transport carries."""
    message = error.message
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + " ..."


def header_text(text: str) -> str:
    """As metadata carries it, which is printable ASCII only: a client that chose other characters knows them anyway."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)


class HttpError(Exception):
    """What is wrong with a call as HTTP, before anything in it is read."""

    def __init__(self, status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}


def error_body(status: int, message: str, *, code: str, field: str | None = None) -> dict[str, Json]:
    """OpenAI's shape of an error."""
    kind = KINDS.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def http_error(error: Exception) -> tuple[int, dict[str, str], dict[str, Json]]:
    """-> status, headers, body.  Logs what is no caller's fault."""
    if isinstance(error, HttpError):
        return error.status, dict(error.headers), error_body(error.status, error.message, code=error.code)
    if not isinstance(error, RequestError):
        log.error("a call failed", exc_info=error)
        error = RequestError("the server failed on this call; its log says why", code=ErrorCode.INTERNAL)
    status = HTTP_STATUS[error.code]
    headers = {"retry-after": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    if status in NO_RETRY:
        headers["x-should-retry"] = "false"
    field = None if error.field is None else error.field[:MAX_MESSAGE_CHARS]
    return status, headers, error_body(status, clear_message(error), code=error.code.value, field=field)


class Statuses:
    """`async with Statuses(context)`: ends the call with the status of whatever the block raises.  A call that was
    cancelled stays cancelled."""

    def __init__(self, context: grpc.aio.ServicerContext):
        self._context = context

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RequestError):
            trailer = [(CODE_KEY, error.code.value)]
            if error.field is not None:
                trailer.append((FIELD_KEY, header_text(error.field)))
            await self._context.abort(GRPC_STATUS[error.code], clear_message(error), tuple(trailer))
        if isinstance(error, Exception):
            log.error("a call failed", exc_info=error)
            trailer = ((CODE_KEY, ErrorCode.INTERNAL.value),)
            await self._context.abort(
                grpc.StatusCode.INTERNAL, "the server failed on this call; its log says why", trailer
            )
