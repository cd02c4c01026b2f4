"""What an answer must look like: JSON, a regular expression, one of a few texts, or a grammar.  Plain data; what
compiles it is `jaxserve.text.structured`.

Standard library only.  Raises RequestError naming the field and the limits."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.errors import RequestError

MAX_SPEC_BYTES = 2**16  # of a schema (as compact JSON), a regular expression, a grammar, or all choices together
JSON_OBJECT = '{"type":"object"}'

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of vLLM's names.  The whole answer matches it: nothing stands before or behind.

    A json schema is kept as compact JSON, its keys in the given order: properties come out in that order."""

    json: str | Mapping[str, object] | None = None  # a JSON schema, or its text
    regex: str | None = None  # Rust's syntax, without look-around and back-references
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark
    json_object: bool = False  # any JSON object
    asked_as: str | None = field(default=None, compare=False)  # what errors call it; None = structured_outputs.<kind>

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}",
                field="structured_outputs",
            )
        put = object.__setattr__
        if self.json is not None:
            put(self, "json", _schema(self.json, self.name))
        elif self.choice is not None:
            put(self, "choice", _choices(self.choice, self.name))
        elif self.json_object:
            if self.json_object is not True:
                raise RequestError(f"{self.name} must be true, got {self.json_object!r}", field=self.name)
        else:
            _check_text(getattr(self, self.kind), self.name)
        size = len("".join(self.choice).encode()) if self.choice is not None else len(self.source.encode())
        if size > MAX_SPEC_BYTES:
            raise RequestError(f"{self.name} has {size} bytes, this engine takes {MAX_SPEC_BYTES}", field=self.name)

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def name(self) -> str:
        """Its name in errors."""
        return self.asked_as or f"structured_outputs.{self.kind}"

    @property
    def source(self) -> str:
        """The text that says what is allowed."""
        if self.choice is not None:
            return json_text.dumps(self.choice)
        return JSON_OBJECT if self.json_object else str(getattr(self, self.kind))


def _schema(schema: object, name: str) -> str:
    try:
        if isinstance(schema, str):
            schema = json_text.loads(schema)
        if not isinstance(schema, Mapping):
            raise RequestError(f"{name} must be a JSON schema: an object, or its text", field=name)
        text = json_text.dumps(dict(schema), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except RecursionError:
        raise RequestError(f"{name} nests too deep", field=name) from None
    except (TypeError, ValueError) as error:  # JSONDecodeError and lone surrogates included
        raise RequestError(f"{name} is no JSON: {error}", field=name) from None
    return text


def _choices(choices: object, name: str) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise RequestError(f"{name} must be a list of at least one text", field=name)
    for text in choices:
        _check_text(text, name)
    return tuple(dict.fromkeys(choices))


def _check_text(text: object, name: str) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} must hold text, and not an empty one", field=name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds a lone surrogate: it must be Unicode text", field=name) from None
