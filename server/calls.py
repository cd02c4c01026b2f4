"""What the fronts share: the attached engine, the worker threads, and every open call's beginning and end.

Whatever may take long (encoding, templates, large bodies) runs in the worker threads.  A call that is left before its
requests have ended aborts them at once, all prompts and all samples, whichever front it came by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from jaxserve.request import Chunk, ErrorCode, FinishReason, Request, RequestError
from jaxserve.streams import merge
from server.args import ServerConfig
from server.backend import Answer, Backend
from server.limits import Limits

Result = TypeVar("Result")


class Calls:
    """One per process, lives in the event loop.  Answers UNAVAILABLE until `attach`, and while the engine drains."""

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
    def config(self) -> ServerConfig:
        return self._config

    @property
    def is_healthy(self) -> bool:
        """The engine is attached and its loop beats."""
        return self._attached is not None and self._attached[0].is_healthy

    @property
    def is_ready(self) -> bool:
        """Healthy, and new requests are taken."""
        return self._attached is not None and self.is_healthy and not self._attached[0].is_draining

    @property
    def open_calls(self) -> int:
        """Generate calls of all fronts whose last message has not been written."""
        return self._open_calls

    def ready(self) -> tuple[Backend, Limits]:
        if self._attached is None:
            raise RequestError("the model is still loading: try again soon", code=ErrorCode.UNAVAILABLE)
        return self._attached

    def accepting(self) -> tuple[Backend, Limits]:
        """`ready`, and not draining: spares the preparation of what would be refused."""
        backend, limits = self.ready()
        if backend.is_draining:
            raise RequestError("the server is shutting down", code=ErrorCode.UNAVAILABLE)
        return backend, limits

    async def in_worker(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    @contextmanager
    def opened(self) -> Iterator[tuple[Backend, Limits]]:
        """One open generate call; prompts that wait to be encoded count too."""
        self._open_calls += 1
        try:
            backend, limits = self.ready()
            if self._open_calls > limits.max_open_calls:
                raise RequestError(
                    f"{limits.max_open_calls} calls are open: try again later", code=ErrorCode.RESOURCE_EXHAUSTED
                )
            yield backend, limits
        finally:
            self._open_calls -= 1

    async def prepare(self, request_id: str, work: Callable[[], Result]) -> Result:
        """`work` in a worker thread; meanwhile the id is taken, and can be aborted."""
        self.check_free(request_id)
        self._preparing[request_id] = False
        try:
            result = await self.in_worker(work)
            if self._preparing[request_id]:
                raise RequestError("the request was aborted", code=ErrorCode.CANCELLED)
            return result
        finally:
            del self._preparing[request_id]

    def check_free(self, request_id: str) -> None:
        """The engine says the same of ids that it knows."""
        if request_id in self._preparing:
            sentence = f"a request with id {request_id!r} is running"
            raise RequestError(sentence, code=ErrorCode.ALREADY_EXISTS, field="id")

    def abort(self, request_id: str) -> bool:
        """False when no such request runs or is being prepared."""
        backend, _ = self.ready()
        if request_id in self._preparing:
            self._preparing[request_id] = True
            return True
        return backend.abort(request_id)


@contextmanager
def submitted(requests: Sequence[Request], backend: Backend) -> Iterator[Running]:
    """The requests of one call, all queued or none; they are aborted if the block is left before they have ended."""
    running = Running(requests, backend)
    try:
        running.submit()
        yield running
    finally:
        running.close()


class Running:
    """The submitted requests of one call.  `async for position, chunk in running` reads them, as chunks come;
    position: which of the requests."""

    def __init__(self, requests: Sequence[Request], backend: Backend):
        self._requests = requests
        self._backend = backend
        self._answers: list[Answer] = []
        self._readers: list[asyncio.Task[None]] = []
        self._ending = Ending(requests, backend)

    def submit(self) -> None:
        """RequestError when one of them cannot be served; then none has begun."""
        if len(self._requests) > 1:
            for request in self._requests:
                self._backend.check(request)
            sequences = sum(request.params.n for request in self._requests)
            if not self._backend.has_room(sequences):
                sentence = f"the queue has no room for {sequences} more sequences: try again later"
                raise RequestError(sentence, code=ErrorCode.RESOURCE_EXHAUSTED)
        for request in self._requests:
            self._answers.append(self._backend.submit(request))

    def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        if self._ending.is_open:
            for answer in self._answers:
                answer.abort()

    @property
    def first_id(self) -> str:
        return self._answers[0].request_id

    def raise_for_status(self) -> None:
        """RequestError when a sample that was read has ended otherwise than by a stop or by its length."""
        self._ending.raise_for_status()

    async def samples(self) -> list[Chunk]:
        """One whole chunk per sample, prompt after prompt.  RequestError as soon as one fails."""
        n = self._requests[0].params.n
        chunks: list[list[Chunk]] = [[] for _ in range(len(self._requests) * n)]
        async for position, chunk in self:
            chunks[position * n + chunk.index].append(chunk)
            if chunk.finish_reason is not None:
                self.raise_for_status()
        return [merge(each) for each in chunks]

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        if len(self._answers) == 1:
            async for chunk in self._answers[0]:
                self._ending.see(chunk)
                yield 0, chunk
            return
        # As many places as there are readers: one that waits to put leaves its answer to merge what comes meanwhile.
        arrived: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue(len(self._answers))
        self._readers = [
            asyncio.create_task(_forward(position, answer, arrived)) for position, answer in enumerate(self._answers)
        ]
        while self._ending.is_open:
            position, chunk = await arrived.get()
            if isinstance(chunk, Exception):
                raise chunk
            self._ending.see(chunk)
            yield position, chunk


async def _forward(position: int, answer: Answer, arrived: asyncio.Queue[tuple[int, Chunk | Exception]]) -> None:
    try:
        async for chunk in answer:
            await arrived.put((position, chunk))
    except Exception as error:  # whoever reads the call raises it
        await arrived.put((position, error))


class Ending:
    """How a call's requests ended, over all of their samples: what the call's status is made of."""

    def __init__(self, requests: Sequence[Request], backend: Backend):
        self._deadline = requests[0].deadline  # one call, one deadline
        self._backend = backend
        self._open = sum(request.params.n for request in requests)
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
        """RequestError unless every sample so far ended by a stop or by its length."""
        if self._error is not None:
            raise RequestError(self._error, code=ErrorCode.INTERNAL)
        if not self._is_aborted:
            return
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise RequestError("the deadline passed before the request ended", code=ErrorCode.DEADLINE_EXCEEDED)
        if self._backend.is_draining:
            raise RequestError("the server is shutting down", code=ErrorCode.UNAVAILABLE)
        raise RequestError("the request was aborted", code=ErrorCode.CANCELLED)
