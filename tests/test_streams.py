"""A request's handle: what wakes its reader, and what the reader gets."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from jaxserve.request import Chunk, FinishReason, Request, SamplingParams, Usage
from jaxserve.streams import RequestHandle
from jaxserve.text import Tokenizer


class Counted(threading.Event):
    """Counts the wake-ups."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def set(self) -> None:
        self.times += 1
        super().set()


@pytest.fixture
def handle() -> RequestHandle:
    request = Request(id="r", prompt_ids=(1,), params=SamplingParams(n=2, detokenize=False))
    handle = RequestHandle(request, cast(Tokenizer, None), lambda _: True)  # which has nothing to decode
    handle._arrived = Counted()
    return handle


def put(handle: RequestHandle, index: int, token: int, *, is_last: bool = False) -> None:
    reason = FinishReason.LENGTH if is_last else None
    usage = Usage(prompt_tokens=1, completion_tokens=2) if is_last else None
    handle.put(Chunk(request_id="r", index=index, token_ids=(token,), finish_reason=reason, usage=usage))


def test_a_stream_is_woken_for_whatever_comes(handle: RequestHandle) -> None:
    chunks = iter(handle)
    put(handle, 0, 5)
    assert next(chunks).token_ids == (5,)
    put(handle, 1, 6)
    assert next(chunks).token_ids == (6,)
    assert cast(Counted, handle._arrived).times == 2


def test_who_collects_is_woken_when_a_sequence_ends_and_gets_everything(handle: RequestHandle) -> None:
    found: list[Chunk] = []
    put(handle, 1, 7)  # before anybody reads
    reader = threading.Thread(target=lambda: found.extend(handle.collect()), daemon=True)
    reader.start()
    while handle._waiting or handle._arrived.is_set():  # it has taken that one and sleeps
        reader.join(0.001)
    before = cast(Counted, handle._arrived).times
    put(handle, 0, 5)
    assert cast(Counted, handle._arrived).times == before
    put(handle, 1, 8, is_last=True)
    assert cast(Counted, handle._arrived).times == before + 1
    put(handle, 0, 6, is_last=True)
    reader.join(10)
    assert [(chunk.index, chunk.token_ids) for chunk in found] == [(0, (5, 6)), (1, (7, 8))]
    assert all(chunk.finish_reason is FinishReason.LENGTH for chunk in found)
