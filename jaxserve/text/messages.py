"""A chat's messages as chat templates expect them: checked, copied, plain JSON.

What callers write in OpenAI's form becomes what templates written for transformers read: text parts are one text, a
tool call's arguments are an object, and a field that is null is not there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from jaxserve.request import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 64  # of lists and objects inside one another

Json = dict | list | str | int | float | bool | None

_SURROGATE = re.compile("[\ud800-\udfff]")


def template_messages(messages: Sequence[Mapping]) -> list[dict]:
    """Raises RequestError naming the message at fault."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}", field="messages")
    if not messages:
        raise RequestError("messages must not be empty", field="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def plain_json(value: object, place: str, *, field: str, depth: int = 0) -> Json:
    """A copy that holds nothing but JSON, and no surrogate: those are the template's.  RequestError names the place."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{place[:80]}... is nested deeper than {MAX_DEPTH}", field=field)
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise RequestError(f"{place} holds a lone surrogate, which is not Unicode text", field=field)
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{place} holds {value}, which is not JSON", field=field)
        return value
    if isinstance(value, Mapping):
        return {
            str(plain_json(str(key), place, field=field)): plain_json(
                each, f"{place}.{key}", field=field, depth=depth + 1
            )
            for key, each in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain_json(each, f"{place}[{i}]", field=field, depth=depth + 1) for i, each in enumerate(value)]
    raise RequestError(f"{place} must be JSON, got {type(value).__name__}", field=field)


def _message(message: Mapping, place: str) -> dict:
    copy = plain_json(message, place, field="messages")
    if not isinstance(copy, dict):
        raise RequestError(f"{place} must be an object with a role and a content", field="messages")
    copy = {name: value for name, value in copy.items() if value is not None}
    role, calls = copy.get("role"), copy.pop("tool_calls", [])
    if role not in ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}; got {role!r:.80}", field="messages")
    for name in ("name", "tool_call_id"):
        if not isinstance(copy.get(name, ""), str):
            raise RequestError(f"{place}.{name} must be a text", field="messages")
    if "tool_call_id" in copy and role != "tool":
        sentence = f"{place}.tool_call_id: only a message of role tool answers a call, not one of role {role}"
        raise RequestError(sentence, field="messages")
    copy["content"] = _content(copy.get("content"), bool(calls), f"{place}.content")
    if calls:
        if role != "assistant":
            raise RequestError(f"{place}.tool_calls: only an assistant calls tools, not a {role}", field="messages")
        copy["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    return copy


def _content(content: Json, has_calls: bool, place: str) -> str:
    """One text.  A list of text parts is joined by newlines, as most templates take texts only."""
    if content is None and has_calls:
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        got = "an empty list" if content == [] else "nothing" if content is None else type(content).__name__
        raise RequestError(f"{place} must be a text or a list of text parts, got {got}", field="messages")
    return content


def _part(part: Json, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RequestError(f"{place} must be a part of type 'text' with a text, got {kind!r:.80}", field="messages")
    return part["text"]


def _tool_calls(calls: Json, place: str) -> list[Json]:
    """Arguments come as JSON in a text; templates want the object."""
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list", field="messages")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{place}[{i}].function must be an object with a name", field="messages")
        if isinstance(call, dict) and call.get("type", "function") != "function":
            raise RequestError(f"{place}[{i}].type must be 'function', got {call['type']!r:.80}", field="messages")
        function["arguments"] = _arguments(function.get("arguments"), f"{place}[{i}].function.arguments")
    return calls


def _arguments(arguments: Json, place: str) -> dict:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{place} is not JSON", field="messages") from None
        arguments = plain_json(arguments, place, field="messages")
    if not isinstance(arguments, dict):
        raise RequestError(f"{place} must be a JSON object, got {type(arguments).__name__}", field="messages")
    return arguments
