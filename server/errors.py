"""RequestError codes to protocol statuses: the one place.

Whatever is no RequestError is our own fault: logged with its traceback, told as INTERNAL without it."""

from __future__ import annotations

import logging
from types import TracebackType

import grpc
import grpc.aio

from jaxserve.request import ErrorCode, RequestError

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

CODE_KEY = "jaxserve-code"  # trailing metadata: the status is this server's own word, not the transport's
FIELD_KEY = "jaxserve-field"  # trailing metadata: the field at fault
MAX_MESSAGE_CHARS = 500  # a value may be quoted, a 100 MB value may not; details travel in an HTTP/2 header


def clear_message(error: RequestError) -> str:
    """The error's sentence, cut to a length that every transport carries."""
    message = error.message
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + " ..."


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
                trailer.append((FIELD_KEY, error.field.encode("ascii", errors="replace").decode()))
            await self._context.abort(GRPC_STATUS[error.code], clear_message(error), tuple(trailer))
        if isinstance(error, Exception):
            log.error("a call failed", exc_info=error)
            trailer = ((CODE_KEY, ErrorCode.INTERNAL.value),)
            await self._context.abort(
                grpc.StatusCode.INTERNAL, "the server failed on this call; its log says why", trailer
            )
