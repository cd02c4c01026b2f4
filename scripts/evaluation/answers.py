"""Requests in, whole answers out, in the same order, all of them batched by the engine.

Knows nothing of the harness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from jaxserve.request import Chunk, ErrorCode, FinishReason, Request, RequestError
from jaxserve.streams import merge
from server.backend import Answer, Backend


def answer_all(backend: Backend, requests: Sequence[Request], on_done: Callable[[], None]) -> list[Chunk]:
    """One whole chunk per request (of one sample each).  A request is submitted as soon as the queue has room for it
    and read as it comes; `on_done` is called at the end of each.

    Raises the first RequestError, and then nothing of this call keeps running."""
    return asyncio.run(_answer_all(backend, requests, on_done))


async def _answer_all(backend: Backend, requests: Sequence[Request], on_done: Callable[[], None]) -> list[Chunk]:
    answers: dict[int, Chunk] = {}
    has_ended = asyncio.Event()

    async def read(index: int, answer: Answer) -> None:
        answers[index] = await _whole(answer)
        on_done()
        has_ended.set()

    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                while not backend.has_room(1) and len(answers) < index:  # some of ours are open: one will end
                    has_ended.clear()
                    await has_ended.wait()
                group.create_task(read(index, backend.submit(request)))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [answers[index] for index in range(len(requests))]


async def _whole(answer: Answer) -> Chunk:
    try:
        whole = merge([chunk async for chunk in answer])
    except asyncio.CancelledError:
        answer.abort()
        raise
    if whole.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise RequestError(whole.error or "the request was aborted", code=ErrorCode.INTERNAL)
    return whole
