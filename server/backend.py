"""What a front needs of an engine: a protocol, so that fronts know neither jax nor threads.

`jaxserve.engine.Engine` is the one that serves; the tests bring a stub."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import Field
from typing import ClassVar, Protocol

from jaxserve.config import EngineConfig
from jaxserve.request import Chunk, Request
from jaxserve.text import Tokenizer


class Answer(Protocol):
    """One request's chunks, as they come; ends after the last chunk of its last sample."""

    @property
    def request_id(self) -> str: ...

    def abort(self) -> bool: ...

    def __aiter__(self) -> AsyncIterator[Chunk]: ...


class Numbers(Protocol):
    """A dataclass whose fields become a message's fields of the same names: `jaxserve.engine.Load`."""

    __dataclass_fields__: ClassVar[dict[str, Field]]


class Info(Numbers, Protocol):
    """`jaxserve.engine.ModelInfo`."""

    @property
    def name(self) -> str: ...

    @property
    def max_len(self) -> int: ...


class Backend(Protocol):
    """A started engine.  `submit` is called in the event loop that will read the answer."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def info(self) -> Info: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def is_draining(self) -> bool: ...

    @property
    def failure(self) -> BaseException | None: ...

    def has_room(self, sequences: int) -> bool:
        """Whether `submit` would take this many more now."""
        ...

    def check(self, request: Request) -> None:
        """RequestError when this model and these limits cannot serve the request, however idle the engine is."""
        ...

    def submit(self, request: Request) -> Answer: ...

    def abort(self, request_id: str) -> bool: ...

    def load(self) -> Numbers: ...

    def stop(self, drain_timeout: float = 0.0) -> None: ...
