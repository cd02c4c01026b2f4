"""The Generation service: one coroutine per call, one message per chunk."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpc.aio import ServicerContext

from jaxserve.request import Chunk, Request, RequestError
from server.backend import Backend
from server.calls import Calls, Running, submitted
from server.errors import Statuses, header_text
from server.limits import Limits, check_bytes
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc
from server.translate import default, load_of, model_info_of, output_of, prompt_ids_of, refuse_unknown, request_of

ID_KEY = "jaxserve-request-id"  # initial metadata of a stream: the request is queued
SMALL_MESSAGE = 4096  # bytes; below it a message without text is translated in the event loop


class GenerationService(pb_grpc.GenerationServicer):
    """Protobuf in, protobuf out; `Calls` knows the engine."""

    def __init__(self, calls: Calls):
        self._calls = calls

    # -- generate ------------------------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> pb.GenerateResponse:
        outputs: dict[int, pb.Output] = {}
        texts: dict[int, list[str]] = {}
        async with Statuses(context), self._running(request, context) as running:
            async for _, chunk in running:
                part = await self._output(chunk)
                texts.setdefault(chunk.index, []).append(part.text)
                outputs.setdefault(chunk.index, pb.Output()).MergeFrom(part)
            running.raise_for_status()
        for index, output in outputs.items():
            output.text = "".join(texts[index])
        return pb.GenerateResponse(outputs=[outputs[index] for index in sorted(outputs)])

    async def GenerateStream(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        # A coroutine that writes, not a generator that yields: a cancel must find us here, whatever we wait for.
        async with Statuses(context), self._running(request, context) as running:
            await context.send_initial_metadata(((ID_KEY, header_text(running.first_id)),))
            async for _, chunk in running:
                await context.write(await self._output(chunk))
            running.raise_for_status()

    @asynccontextmanager
    async def _running(self, message: pb.GenerateRequest, context: ServicerContext) -> AsyncIterator[Running]:
        with self._calls.opened() as (backend, limits):
            request = await self._request(message, context, backend, limits)
            with submitted([request], backend) as running:
                yield running

    async def _request(
        self, message: pb.GenerateRequest, context: ServicerContext, backend: Backend, limits: Limits
    ) -> Request:
        remaining = context.time_remaining()
        deadline = None if remaining is None else time.monotonic() + remaining
        check_bytes("id", message.id, limits.max_id_bytes)
        request_id = message.id or secrets.token_hex(16)

        def translate() -> Request:
            return backend.prepare(
                request_of(
                    message, request_id=request_id, deadline=deadline, tokenizer=backend.tokenizer, limits=limits
                )
            )

        is_plain = not message.params.bad_words and not message.params.HasField("structured_outputs")
        if is_plain and message.WhichOneof("prompt") == "token_ids" and message.ByteSize() < SMALL_MESSAGE:
            self._calls.check_free(request_id)
            return translate()
        return await self._calls.prepare(request_id, translate)

    async def _output(self, chunk: Chunk) -> pb.Output:
        backend, _ = self._calls.ready()
        if chunk.prompt_logprobs is None:
            return output_of(chunk, backend.tokenizer)
        return await self._calls.in_worker(lambda: output_of(chunk, backend.tokenizer))

    # -- the rest ------------------------------------------------------------------------------------------------

    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        async with Statuses(context):
            self._calls.ready()
            refuse_unknown(request, "request")
            if not request.id:
                raise RequestError("id is empty: which request shall end?", field="id")
            return pb.AbortResponse(found=self._calls.abort(request.id))

    async def Tokenize(self, request: pb.TokenizeRequest, context: ServicerContext) -> pb.TokenizeResponse:
        async with Statuses(context):
            backend, limits = self._calls.ready()
            refuse_unknown(request, "request")
            add_bos = request.add_bos if request.HasField("add_bos") else None
            if add_bos is not None and request.WhichOneof("prompt") == "chat":
                raise RequestError("add_bos goes with text; a chat's template decides", field="add_bos")
            ids = await self._calls.in_worker(
                lambda: prompt_ids_of(request, backend.tokenizer, limits, add_bos=add_bos)
            )
            return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: ServicerContext) -> pb.DetokenizeResponse:
        async with Statuses(context):
            backend, limits = self._calls.ready()
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
            text = await self._calls.in_worker(lambda: backend.tokenizer.decode(ids, skip_special=skip_special))
            return pb.DetokenizeResponse(text=text)

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: ServicerContext) -> pb.ModelInfoResponse:
        async with Statuses(context):
            refuse_unknown(request, "request")
            return model_info_of(*self._calls.ready(), tool_parser=self._calls.config.tool_call_parser)

    async def Load(self, request: pb.LoadRequest, context: ServicerContext) -> pb.LoadResponse:
        async with Statuses(context):
            refuse_unknown(request, "request")
            return load_of(self._calls.ready()[0].load())
