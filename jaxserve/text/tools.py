"""Tools and the choice between them, as OpenAI's chat requests name them: checked, and what follows for the answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxserve.request import RequestError
from jaxserve.text.messages import Json, plain_json

MAX_TOOLS = 128

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: Mapping[str, Json] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    parameters: Mapping[str, Json]  # JSON schema of an object
    is_strict: bool  # a keyword of the schema that cannot be held to is an error, not a hint
    spec: Mapping[str, Json]  # what the model is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """none: no call; auto: as the model likes; required: calls and nothing else; with `name`, one call of that tool."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def tools_of(value: object) -> tuple[Tool, ...]:
    """[{"type": "function", "function": {"name", "description", "parameters", "strict"}}, ...], at least one.
    Raises RequestError naming the place."""
    tools = plain_json(value, "tools", field="tools")
    if not isinstance(tools, list) or not tools:
        raise _wrong("tools must be a list of at least one function")
    if len(tools) > MAX_TOOLS:
        raise _wrong(f"tools has {len(tools)} entries, this server takes {MAX_TOOLS}")
    found = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool.name for tool in found]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise _wrong(f"tools has two functions with the name {twice!r}")
    return tuple(found)


def choice_of(value: Json, tools: Sequence[Tool]) -> ToolChoice:
    """tool_choice: "none", "auto", "required" or {"type": "function", "function": {"name"}}; null is auto."""
    match value:
        case None | "auto":
            return ToolChoice(mode="auto")
        case "none":
            return ToolChoice(mode="none")
        case "required":
            return ToolChoice(mode="required")
        case {"type": "function", "function": {"name": str() as name, **more}, **rest} if not more and not rest:
            if name not in (tool.name for tool in tools):
                raise _wrong(f"tool_choice names {name!r:.80}, which is not among tools", "tool_choice")
            return ToolChoice(mode="required", name=name)
    sentence = 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    raise _wrong(sentence, "tool_choice")


def _tool(tool: Json, place: str) -> Tool:
    tool = _object(tool, place, ("type", "function"))
    if tool.get("type") != "function":
        raise _wrong(f"{place}.type must be 'function', got {tool.get('type')!r:.80}")
    function = _object(tool.get("function"), f"{place}.function", ("name", "description", "parameters", "strict"))
    name, strict = function.get("name"), function.pop("strict", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{place}.function.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -; got {name!r:.80}")
    if not isinstance(function.get("description", ""), str):
        raise _wrong(f"{place}.function.description must be a text")
    if not isinstance(strict, bool):
        raise _wrong(f"{place}.function.strict must be true or false")
    parameters = function.get("parameters", _NO_PARAMETERS)
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _wrong(f"{place}.function.parameters must be a JSON schema of type 'object'")
    spec = {"type": "function", "function": function}
    return Tool(name=name, parameters={"type": "object", **parameters}, is_strict=strict, spec=spec)


def _object(value: Json, place: str, fields: Collection[str]) -> dict:
    """Its fields that are not null."""
    if not isinstance(value, dict):
        raise _wrong(f"{place} must be an object")
    if unknown := next((name for name in value if name not in fields), None):
        raise _wrong(f"{place}.{unknown:.60} is not a field that this server supports")
    return {name: each for name, each in value.items() if each is not None}


def _wrong(sentence: str, field: str = "tools") -> RequestError:
    return RequestError(sentence, field=field)
