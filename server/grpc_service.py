"""The Generation service: one coroutine per call, one message per chunk.

Whatever may take long (encoding, templates, large messages) runs in the worker threads.  A call that is cancelled or
whose client is gone aborts its request at once, all of its samples."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from grpc.aio import ServicerContext

from jaxserve.request import Chunk, ErrorCode, FinishReason, Request, RequestError
from server.args import ServerConfig
from server.backend import Answer, Backend
from server.errors import Statuses
from server.limits import Limits, check_bytes
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc
from server.translate import default, load_of, model_info_of, output_of, prompt_ids_of, refuse_unknown, request_of

ID_KEY = "jaxserve-request-id"  # initial metadata of a stream: the request is queued
SMALL_MESSAGE = 4096  # bytes; below it a message without text is translated in the event loop

Result = TypeVar("Result")


class GenerationService(pb_grpc.GenerationServicer):
    """Answers UNAVAILABLE until `attach`, and while the engine drains."""

    def __init__(self, config: ServerConfig):
        self._config = config
        self._workers = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="jaxserve-text")
        self._attached: tuple[Backend, Limits] | None = None
        self._preparing: dict[str, bool] = {}  # ids not yet submitted -> aborted meanwhile
        self._open_calls = 0

    def attach(self, backend: Backend) -> None:
        """From now on, serve with this (started) engine."""
        self._attached = (backend, Limits.of(self._config, backend))

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def open_calls(self) -> int:
        """Generate calls whose last message has not been written."""
        return self._open_calls

    # -- generate ------------------------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> pb.GenerateResponse:
        outputs: dict[int, pb.Output] = {}
        texts: dict[int, list[str]] = {}
        async with Statuses(context), self._answer(request, context) as (answer, ending):
            async for chunk in answer:
                ending.see(chunk)
                part = await self._output(chunk)
                texts.setdefault(chunk.index, []).append(part.text)
                outputs.setdefault(chunk.index, pb.Output()).MergeFrom(part)
            ending.raise_for_status()
        for index, output in outputs.items():
            output.text = "".join(texts[index])
        return pb.GenerateResponse(outputs=[outputs[index] for index in sorted(outputs)])

    async def GenerateStream(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        # A coroutine that writes, not a generator that yields: a cancel must find us here, whatever we wait for.
        async with Statuses(context), self._answer(request, context) as (answer, ending):
            await context.send_initial_metadata(((ID_KEY, _ascii(answer.request_id)),))
            async for chunk in answer:
                ending.see(chunk)
                await context.write(await self._output(chunk))
            ending.raise_for_status()

    @asynccontextmanager
    async def _answer(
        self, message: pb.GenerateRequest, context: ServicerContext
    ) -> AsyncIterator[tuple[Answer, Ending]]:
        """A submitted request; it is aborted if the block is left before it has ended."""
        self._open_calls += 1
        try:
            backend, limits = self._ready()
            if self._open_calls > limits.max_open_calls:  # prompts that wait to be encoded count too
                raise RequestError(
                    f"{limits.max_open_calls} calls are open: try again later", code=ErrorCode.RESOURCE_EXHAUSTED
                )
            request = await self._request(message, context, backend, limits)
            answer = backend.submit(request)
            ending = Ending(request, backend)
            try:
                yield answer, ending
            finally:
                if ending.is_open:
                    answer.abort()
        finally:
            self._open_calls -= 1

    async def _request(
        self, message: pb.GenerateRequest, context: ServicerContext, backend: Backend, limits: Limits
    ) -> Request:
        """The translated request.  While it is being prepared its id is taken, and can be aborted."""
        remaining = context.time_remaining()
        deadline = None if remaining is None else time.monotonic() + remaining
        check_bytes("id", message.id, limits.max_id_bytes)
        request_id = message.id or secrets.token_hex(16)
        if request_id in self._preparing:
            sentence = f"a request with id {request_id!r} is running"
            raise RequestError(sentence, code=ErrorCode.ALREADY_EXISTS, field="id")

        def translate() -> Request:
            return request_of(
                message, request_id=request_id, deadline=deadline, tokenizer=backend.tokenizer, limits=limits
            )

        if message.WhichOneof("prompt") == "token_ids" and message.ByteSize() < SMALL_MESSAGE:
            return translate()
        self._preparing[request_id] = False
        try:
            request = await self._in_worker(translate)
            if self._preparing[request_id]:
                raise RequestError("the request was aborted", code=ErrorCode.CANCELLED)
            return request
        finally:
            del self._preparing[request_id]

    async def _output(self, chunk: Chunk) -> pb.Output:
        backend, _ = self._ready()
        if chunk.prompt_logprobs is None:
            return output_of(chunk, backend.tokenizer)
        return await self._in_worker(lambda: output_of(chunk, backend.tokenizer))

    # -- the rest ------------------------------------------------------------------------------------------------

    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        async with Statuses(context):
            backend, _ = self._ready()
            refuse_unknown(request, "request")
            if not request.id:
                raise RequestError("id is empty: which request shall end?", field="id")
            if request.id in self._preparing:
                self._preparing[request.id] = True
                return pb.AbortResponse(found=True)
            return pb.AbortResponse(found=backend.abort(request.id))

    async def Tokenize(self, request: pb.TokenizeRequest, context: ServicerContext) -> pb.TokenizeResponse:
        async with Statuses(context):
            backend, limits = self._ready()
            refuse_unknown(request, "request")
            add_bos = request.add_bos if request.HasField("add_bos") else None
            if add_bos is not None and request.WhichOneof("prompt") == "chat":
                raise RequestError("add_bos goes with text; a chat's template decides", field="add_bos")
            ids = await self._in_worker(lambda: prompt_ids_of(request, backend.tokenizer, limits, add_bos=add_bos))
            return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: ServicerContext) -> pb.DetokenizeResponse:
        async with Statuses(context):
            backend, limits = self._ready()
            refuse_unknown(request, "request")
            if len(request.token_ids) > limits.max_len:
                many = len(request.token_ids)
                raise RequestError(f"token_ids holds {many} ids, this server takes {limits.max_len}", field="token_ids")
            vocab = backend.tokenizer.vocab_size
            for token_id in request.token_ids:
                if not 0 <= token_id < vocab:
                    raise RequestError(f"token_ids holds {token_id}: ids go from 0 to {vocab - 1}", field="token_ids")
            skip_special = default(request, "skip_special_tokens", True)
            ids = list(request.token_ids)
            text = await self._in_worker(lambda: backend.tokenizer.decode(ids, skip_special=skip_special))
            return pb.DetokenizeResponse(text=text)

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: ServicerContext) -> pb.ModelInfoResponse:
        async with Statuses(context):
            return model_info_of(*self._ready())

    async def Load(self, request: pb.LoadRequest, context: ServicerContext) -> pb.LoadResponse:
        async with Statuses(context):
            return load_of(self._ready()[0].load())

    def _ready(self) -> tuple[Backend, Limits]:
        if self._attached is None:
            raise RequestError("the model is still loading: try again soon", code=ErrorCode.UNAVAILABLE)
        return self._attached

    async def _in_worker(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)


class Ending:
    """How a request ended, over all of its samples: what its call's status is made of."""

    def __init__(self, request: Request, backend: Backend):
        self._request = request
        self._backend = backend
        self._open = request.params.n
        self._error: str | None = None
        self._is_aborted = False

    @property
    def is_open(self) -> bool:
        return self._open > 0

    def see(self, chunk: Chunk) -> None:
        if chunk.finish_reason is None:
            return
        self._open -= 1
        if chunk.finish_reason is FinishReason.ERROR:
            self._error = chunk.error or "the request failed"
        self._is_aborted |= chunk.finish_reason is FinishReason.ABORT

    def raise_for_status(self) -> None:
        """RequestError unless every sample ended by a stop or by its length."""
        if self._error is not None:
            raise RequestError(self._error, code=ErrorCode.INTERNAL)
        if not self._is_aborted:
            return
        if self._request.deadline is not None and time.monotonic() >= self._request.deadline:
            raise RequestError("the deadline passed before the request ended", code=ErrorCode.DEADLINE_EXCEEDED)
        if self._backend.is_draining:
            raise RequestError("the server is shutting down", code=ErrorCode.UNAVAILABLE)
        raise RequestError("the request was aborted", code=ErrorCode.CANCELLED)


def _ascii(text: str) -> str:
    """Metadata carries ASCII; a client that chose another id knows it anyway."""
    return text.encode("ascii", errors="replace").decode()
