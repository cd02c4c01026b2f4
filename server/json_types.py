"""Checkers of JSON values: (name, value) -> the value, or a RequestError that names the field and never repeats more
than a glimpse of what was sent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxserve.request import RequestError

Json = dict | list | str | int | float | bool | None
Check = Callable[[str, Json], object]

MAX_QUOTE = 60  # characters of a wrong value that an error repeats


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a body: what checks its value, and the JSON schema that tells of it."""

    check: Check
    schema: Mapping[str, Json]


def load_json(raw: bytes, what: str) -> Json:
    """RFC 8259, in UTF-8, no name twice in an object.  what: names the text in the RequestError."""
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise RequestError(f"{what} is not UTF-8") from None
    except RecursionError:
        raise RequestError(f"{what} is nested too deep") from None
    except ValueError as error:  # JSONDecodeError, and a number of thousands of digits
        raise RequestError(f"{what} is not JSON: {error}") from None


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise RequestError(f"{quote(twice)} stands twice in one object")
    return found


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is no number of JSON's")


def quote(value: Json) -> str:
    """A wrong value, or what it is."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[: 2 * MAX_QUOTE] if isinstance(value, str) else value)
    return text if len(text) <= MAX_QUOTE else text[:MAX_QUOTE] + "..."


def wrong(name: str, what: str, value: Json) -> RequestError:
    return RequestError(f"{name} must be {what}, got {quote(value)}", field=name)


def integer(name: str, value: Json) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value.bit_length() > 64:
        raise wrong(name, "an integer", value)
    return value


def number(name: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, "a number", value)
    if (isinstance(value, int) and value.bit_length() > 64) or not math.isfinite(value):
        raise wrong(name, "a finite number", value)
    return float(value)


def boolean(name: str, value: Json) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def text(name: str, value: Json) -> str:
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds a lone surrogate: it must be Unicode text", field=name) from None
    return value


def integers(name: str, value: Json) -> list[int]:
    if not isinstance(value, list):
        raise wrong(name, "a list of integers", value)
    return [integer(name, item) for item in value]


def texts(name: str, value: Json) -> list[str]:
    """One text or several."""
    if isinstance(value, str):
        return [text(name, value)]
    if not isinstance(value, list):
        raise wrong(name, "a text or a list of texts", value)
    return [text(name, item) for item in value]


def biases(name: str, value: Json) -> dict[int, float]:
    """Token ids are keys, and JSON's keys are texts."""
    if not isinstance(value, dict):
        raise wrong(name, "an object of token id: bias", value)
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"{name} has the key {quote(key)}: keys are token ids", field=name)
        found[int(key)] = number(name, bias)
    return found
