"""A gRPC message that is none: refused as the caller's fault.

Left to itself gRPC answers UNKNOWN, which is the server's own fault, and logs a traceback for every such call."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from jaxserve.request import RequestError
from server.errors import Statuses
from server.grpc_handlers import Continuation, behaviour_of, with_behaviour


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """INVALID_ARGUMENT for bytes that are no message of the method's kind; reflection, which reads a stream of
    messages, is left alone."""

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        return handler if handler is None or handler.request_streaming else _decoding(handler)


def _decoding(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """The same handler; it decodes inside of the call, where a refusal has a status and is recorded."""
    inner, decode = behaviour_of(handler), handler.request_deserializer
    assert decode is not None, "every method of ours has messages"

    async def call(raw: object, context: grpc.aio.ServicerContext) -> object:
        async with Statuses(context):
            try:
                request = decode(cast(bytes, raw))
            except DecodeError:
                raise RequestError("the bytes sent are no message of this method's kind") from None
        return await cast(Awaitable[object], inner(request, context))

    return with_behaviour(handler, call, decodes_request=True)
