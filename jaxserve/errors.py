"""What a caller did wrong, or ran into.  Standard library only; `jaxserve.request` gives these names on."""

from __future__ import annotations

import enum


class ErrorCode(enum.Enum):
    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class RequestError(Exception):
    """This caller's fault (or this caller's bad luck): a code that every front maps, one clear sentence, and the
    name of the field at fault when there is one."""

    def __init__(self, message: str, *, code: ErrorCode = ErrorCode.INVALID_ARGUMENT, field: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
