"""A gRPC method's handler, taken apart and put together again: what an interceptor does to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import grpc
import grpc.aio

# (request or its stream, context) -> answer; a coroutine function, or an async generator function where it streams.
Behaviour = Callable[[object, grpc.aio.ServicerContext], Awaitable[object] | AsyncIterator[object]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]

_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def behaviour_of(handler: grpc.RpcMethodHandler) -> Behaviour:
    candidates = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return cast(Behaviour, next(behaviour for behaviour in candidates if behaviour is not None))


def with_behaviour(
    handler: grpc.RpcMethodHandler, behaviour: Behaviour, *, decodes_request: bool = False
) -> grpc.RpcMethodHandler:
    """The same method with the same messages, done by another function.  decodes_request: it takes the bytes."""
    make = _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]
    deserializer = None if decodes_request else handler.request_deserializer
    return make(behaviour, deserializer, handler.response_serializer)
