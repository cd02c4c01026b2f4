"""What is remembered of a call while it runs, and told once when it is over: to the access log, to the tracer.

A record rides in a context variable, so the rooms between a front's edge and the engine need not pass it on.  It holds
numbers and ids, never a word of a prompt or an answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from jaxserve.request import Chunk, Request, Times

log = logging.getLogger("jaxserve.access")

MAX_CHARS = 128  # of an id or a path in a line


@dataclass(slots=True, kw_only=True)
class Record:
    """One call of either front.  Seconds on the engine's clock (time.monotonic)."""

    front: str  # grpc | http
    route: str  # a gRPC method, or an HTTP method and path without its query
    x_request_id: str = ""
    traceparent: str = ""  # as the caller sent it (W3C Trace Context)
    tracestate: str = ""
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: str = ""
    request_ids: list[str] = field(default_factory=list)  # the engine's, of the requests that were queued
    prompt_tokens: int = 0
    completion_tokens: int = 0  # that were read; of a call that was left, more may have been drawn
    cached_tokens: int = 0
    times: list[Times] = field(default_factory=list)  # of the sequences whose end was read
    finish_reasons: list[str] = field(default_factory=list)


_current: ContextVar[Record | None] = ContextVar("record", default=None)
Observer = Callable[[Record], None]


@contextmanager
def recorded(record: Record, observers: Sequence[Observer]) -> Iterator[Record]:
    """The block is the call; whatever way it is left, the observers are told."""
    _current.set(record)
    try:
        yield record
    finally:
        _current.set(None)
        record.ended = time.monotonic()
        for observe in observers:
            observe(record)


def note_request(request: Request) -> None:
    """A request of the running call is queued."""
    record = _current.get()
    if record is not None:
        record.request_ids.append(request.id)
        record.prompt_tokens += len(request.prompt_ids)


def note_chunk(chunk: Chunk) -> None:
    """A chunk of the running call has come; the last ones of its sequences tell how they went."""
    record = _current.get()
    if record is None:
        return
    record.completion_tokens += len(chunk.token_ids)
    if chunk.finish_reason is None:
        return
    record.finish_reasons.append(chunk.finish_reason.value)
    if chunk.usage is not None:
        record.cached_tokens += chunk.usage.cached_tokens
    if chunk.times is not None:
        record.times.append(chunk.times)


def log_access(record: Record) -> None:
    """One line a call."""
    log.info("%s", access_line(record))


def access_line(record: Record) -> str:
    """Words and `name=value` pairs, parted by spaces; nothing a caller wrote can break the line."""
    parts = [record.front, *plain(record.route).split(" "), record.status]
    if record.x_request_id:
        parts.append(f"x-request-id={plain(record.x_request_id)}")
    if record.request_ids:
        parts.append(f"id={plain(record.request_ids[0])}")
    if len(record.request_ids) > 1:
        parts.append(f"requests={len(record.request_ids)}")
    if record.request_ids:
        parts += [f"prompt_tokens={record.prompt_tokens}", f"completion_tokens={record.completion_tokens}"]
    if record.finish_reasons:
        parts.append(f"finish={','.join(sorted(set(record.finish_reasons)))}")
    parts.append(f"seconds={record.ended - record.began:.3f}")
    return " ".join(parts)


def plain(text: str) -> str:
    """Printable ASCII, cut to a length."""
    cut = text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "..."
    return cut.encode("unicode_escape").decode("ascii")
