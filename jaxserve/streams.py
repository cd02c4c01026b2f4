"""From the loop to whoever reads: one handle per request, one hand-over per step and event loop.

Chunks that a slow reader has not taken are merged, never dropped.  Text of rows without stop strings is decoded here,
on the reader's side."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from jaxserve.request import Chunk, FinishReason, Request
from jaxserve.text import Tokenizer
from jaxserve.text.detokenize import Detokenizer


class RequestHandle:
    """Read one request's chunks: `async for chunk in handle` in the event loop that submitted it, or `for chunk in
    handle` in a plain thread.  Ends after the last chunk of the last of its n sequences."""

    def __init__(self, request: Request, tokenizer: Tokenizer, abort: Callable[[str], bool]):
        self.request = request
        self._tokenizer = tokenizer
        self._abort = abort
        self._waiting: deque[Chunk] = deque()
        self._wants_ends = False  # the reader sleeps until a sequence ends
        self._unfinished = request.params.n
        self._decoders: dict[int, Detokenizer] = {}
        self._loop = _running_loop()
        self._arrived = asyncio.Event() if self._loop else threading.Event()

    @property
    def request_id(self) -> str:
        return self.request.id

    def abort(self) -> bool:
        """End the request; its pages come back within a step.  False when it had ended already."""
        return self._abort(self.request_id)

    def put(self, chunk: Chunk) -> None:
        """Called on the reader's side of the hand-over."""
        self._waiting.append(chunk)
        # Looking first spares the loop a lock per chunk; a reader clears before it takes, so nothing is missed.
        if (chunk.finish_reason is not None or not self._wants_ends) and not self._arrived.is_set():
            self._arrived.set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Where the reader lives; None for a plain thread."""
        return self._loop

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        assert isinstance(self._arrived, asyncio.Event), "this handle was submitted outside an event loop"
        while self._unfinished:
            await self._arrived.wait()
            for chunk in self._take():
                yield chunk

    def __iter__(self) -> Iterator[Chunk]:
        assert isinstance(self._arrived, threading.Event), "this handle was submitted inside an event loop"
        while self._unfinished:
            self._arrived.wait()
            yield from self._take()

    def collect(self) -> list[Chunk]:
        """Wait in a plain thread until all n sequences have ended: one chunk each, by index.  The reader is not woken
        for what comes before, which costs the loop the interpreter for as long."""
        self._wants_ends = True
        by_index: dict[int, list[Chunk]] = {}
        for chunk in self:
            by_index.setdefault(chunk.index, []).append(chunk)
        return [merge(by_index[index]) for index in sorted(by_index)]

    def _take(self) -> list[Chunk]:
        """Everything that waits, one chunk per sequence."""
        self._arrived.clear()
        by_index: dict[int, list[Chunk]] = {}
        while self._waiting:
            chunk = self._waiting.popleft()
            by_index.setdefault(chunk.index, []).append(chunk)
        merged = [self._with_text(merge(chunks)) for chunks in by_index.values()]
        self._unfinished -= sum(chunk.finish_reason is not None for chunk in merged)
        return merged

    def _with_text(self, chunk: Chunk) -> Chunk:
        params = self.request.params
        if not params.detokenize or chunk.text is not None:
            return chunk
        decoder = self._decoders.get(chunk.index)
        if decoder is None:
            shown = self.request.shown_ids
            decoder = Detokenizer(self._tokenizer, skip_special=params.skip_special_tokens, shown_ids=shown)
            self._decoders[chunk.index] = decoder
        return replace(chunk, text=decode(decoder, chunk, include_stop=params.include_stop_str_in_output))


def decode(decoder: Detokenizer, chunk: Chunk, *, include_stop: bool) -> str:
    """The text a chunk without stop strings adds: the stop id's own text is cut, a finished sequence is flushed."""
    ends_by_id = chunk.finish_reason is FinishReason.STOP and not isinstance(chunk.stop_reason, str)
    token_ids = chunk.token_ids[:-1] if ends_by_id and not include_stop else chunk.token_ids
    text = decoder.feed(token_ids).text
    return text if chunk.finish_reason is None else text + decoder.flush()


def merge(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of one sequence, in order, as one."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    texts = [chunk.text for chunk in chunks if chunk.text is not None]
    logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    prompts = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
    return replace(
        last,
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        text="".join(texts) if texts else None,
        logprobs=tuple(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=prompts[0] if prompts else None,
    )


def hand_over(deliveries: Sequence[tuple[RequestHandle, Chunk]]) -> None:
    """From the loop's thread: one wake-up per event loop for everything that a step produced."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestHandle, Chunk]]] = {}
    for handle, chunk in deliveries:
        if handle.loop is None:
            handle.put(chunk)
        else:
            by_loop.setdefault(handle.loop, []).append((handle, chunk))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # the reader's event loop is closed: nobody reads any more
            for handle in {id(handle): handle for handle, _ in batch}.values():
                handle.abort()


def _put_all(batch: Sequence[tuple[RequestHandle, Chunk]]) -> None:
    for handle, chunk in batch:
        handle.put(chunk)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
