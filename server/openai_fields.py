"""The fields of OpenAI's request bodies: what checks each value, and the JSON schema that tells of it.

The one place where a field is added.  Names that OpenAI does not have are vLLM's.  A field that is not here is refused
by name; so is a value here that asks for what this server does not do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from jaxserve.request import INT32_MAX, MAX_LOGPROBS, MAX_SAMPLES, RequestError
from server import json_schema
from server.json_schema import SOME_TEXT, STRING, Schema, any_of, array_of, nullable, object_of
from server.json_types import (
    Field,
    Json,
    biases,
    boolean,
    integer,
    integers,
    number,
    quote,
    text,
    texts,
    wrong,
)  # fmt: skip
from server.limits import MAX_TIMEOUT
from server.openai_structured import RESPONSE_FORMAT, STRUCTURED
from server.openai_tools import TOOL_CALLS, TOOL_FIELDS

Kind = Literal["completion", "chat"]

MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
PART_FIELDS = ("type", "text")
CALL_FIELDS = ("id", "type", "function")

Prompt = str | list[int]


def prompts(name: str, value: Json) -> list[Prompt]:
    """One prompt or several, each a text or a list of token ids."""
    if isinstance(value, str):
        return [text(name, value)]
    if not isinstance(value, list):
        raise wrong(name, "a text, a list of token ids, or a list of texts or of lists of token ids", value)
    if value and isinstance(value[0], str | list):
        return [_prompt(f"{name}[{index}]", each) for index, each in enumerate(value)]
    return [integers(name, value)]


def _prompt(name: str, value: Json) -> Prompt:
    if not isinstance(value, str | list):
        raise wrong(name, "a text or a list of token ids", value)
    return text(name, value) if isinstance(value, str) else integers(name, value)


def messages(name: str, value: Json) -> list[Json]:
    """What stands in the messages is checked where the template is rendered."""
    if not isinstance(value, list):
        raise wrong(name, "a list of messages", value)
    return [_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def _message(name: str, message: Json) -> Json:
    if not isinstance(message, dict):
        return message
    given = {key: value for key, value in message.items() if value is not None}
    refuse_unknown(given, MESSAGE_FIELDS, where=f"{name}.")
    if isinstance(given.get("content"), list):
        for index, part in enumerate(given["content"]):
            if isinstance(part, dict) and part.get("type") == "text":
                refuse_unknown(part, PART_FIELDS, where=f"{name}.content[{index}].")
    if isinstance(given.get("tool_calls"), list):
        for index, call in enumerate(given["tool_calls"]):
            if isinstance(call, dict):
                refuse_unknown(call, CALL_FIELDS, where=f"{name}.tool_calls[{index}].")
    return given


def stream_options(name: str, value: Json) -> dict[str, bool]:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    refuse_unknown(value, ("include_usage",), where=f"{name}.")
    return {key: boolean(f"{name}.{key}", each) for key, each in value.items() if each is not None}


def seconds(name: str, value: Json) -> float:
    given = number(name, value)
    if not 0 < given <= MAX_TIMEOUT:
        raise RequestError(f"{name} must be above 0 and at most {MAX_TIMEOUT} seconds, got {given}", field=name)
    return given


def only(*allowed: Json, why: str) -> Field:
    """A field of which this server does one thing only: asked for another, it says why not."""

    def check(name: str, value: Json) -> Json:
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise RequestError(f"{name}={quote(value)} is not supported: {why}", field=name)
        return value

    return Field(check, {"enum": list(allowed)})


def ranged(check: Callable[[str, Json], float], kind: str, low: float, high: float) -> Field:
    """A number between two others, which SamplingParams knows as well; here it is told under the body's own name."""

    def within(name: str, value: Json) -> float:
        given = check(name, value)
        if not low <= given <= high:
            raise RequestError(f"{name} must be between {low} and {high}, got {quote(value)}", field=name)
        return given

    return Field(within, {"type": kind, "minimum": low, "maximum": high})


BOOLEAN = Field(boolean, json_schema.BOOLEAN)
TEXT = Field(text, STRING)
TOKEN_IDS = array_of({"type": "integer", "minimum": 0, "maximum": INT32_MAX})
IDS = Field(integers, TOKEN_IDS)
COUNT = ranged(integer, "integer", 0, INT32_MAX)
LOGPROBS = ranged(integer, "integer", 0, MAX_LOGPROBS)

# SamplingParams' fields that bodies name and type alike.
SAMPLING: Mapping[str, Field] = {
    "min_tokens": COUNT,
    "n": ranged(integer, "integer", 1, MAX_SAMPLES),
    "temperature": ranged(number, "number", 0, 100),
    "top_k": ranged(integer, "integer", -1, INT32_MAX),
    "top_p": Field(number, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "min_p": ranged(number, "number", 0, 1),
    "presence_penalty": ranged(number, "number", -2, 2),
    "frequency_penalty": ranged(number, "number", -2, 2),
    "repetition_penalty": ranged(number, "number", 0.01, 100),
    "logit_bias": Field(
        biases,
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    ),
    "allowed_token_ids": Field(integers, {**TOKEN_IDS, "minItems": 1}),
    "banned_token_ids": IDS,
    "seed": ranged(integer, "integer", -(2**63), 2**64 - 1),
    "stop": Field(texts, any_of(SOME_TEXT, array_of(SOME_TEXT))),
    "stop_token_ids": IDS,
    "include_stop_str_in_output": BOOLEAN,
    "ignore_eos": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "speculate": BOOLEAN,
    "prompt_logprobs_start": COUNT,
    **STRUCTURED,
}
COMMON: Mapping[str, Field] = {
    **SAMPLING,
    "model": TEXT,
    "max_tokens": COUNT,
    "prompt_logprobs": LOGPROBS,
    "stream": BOOLEAN,
    "stream_options": Field(stream_options, object_of({"include_usage": json_schema.BOOLEAN})),
    "priority": ranged(integer, "integer", -(2**31), INT32_MAX),
    "cache_salt": TEXT,
    "return_token_ids": BOOLEAN,
    "timeout": Field(seconds, {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT}),
    "user": TEXT,
    "response_format": RESPONSE_FORMAT,
}
_CONTENT = any_of(STRING, array_of(object_of(type={"const": "text"}, text=STRING), minItems=1))
_NAME: Mapping[str, Schema] = {"name": STRING}
MESSAGE = any_of(
    object_of(_NAME, role={"enum": ["system", "developer", "user", "assistant"]}, content=_CONTENT),
    object_of({**_NAME, "tool_call_id": STRING}, role={"const": "tool"}, content=_CONTENT),
    object_of(
        {**_NAME, "content": nullable(_CONTENT)},
        role={"const": "assistant"},
        tool_calls={**TOOL_CALLS, "minItems": 1},
    ),
)
FIELDS: Mapping[Kind, Mapping[str, Field]] = {
    "completion": {
        **COMMON,
        "prompt": Field(
            prompts,
            any_of(
                SOME_TEXT,
                {**TOKEN_IDS, "minItems": 1},
                array_of(SOME_TEXT, minItems=1),
                array_of({**TOKEN_IDS, "minItems": 1}, minItems=1),
            ),
        ),
        "echo": BOOLEAN,
        "logprobs": LOGPROBS,
        "add_special_tokens": BOOLEAN,
    },
    "chat": {
        **COMMON,
        "messages": Field(messages, array_of(MESSAGE, minItems=1)),
        "max_completion_tokens": COUNT,
        "logprobs": BOOLEAN,
        "top_logprobs": LOGPROBS,
        "add_generation_prompt": BOOLEAN,
        **TOOL_FIELDS,
        "store": only(False, why="nothing is stored"),
        "service_tier": only("auto", "default", why="there is one tier, default"),
        "modalities": only(["text"], why="answers are text"),
    },
}
REQUIRED: Mapping[Kind, str] = {"completion": "prompt", "chat": "messages"}


def refuse_unknown(given: Mapping[str, Json], known: Collection[str], where: str = "") -> None:
    for name in given:
        if name not in known:
            field = where + (name if name.isidentifier() and len(name) <= 60 else quote(name))
            raise RequestError(f"{field} is not a field that this server supports", field=field)


def checked(body: Json, fields: Mapping[str, Field]) -> dict[str, object]:
    """The values of a body's fields, each checked; null is the same as leaving a field out."""
    if not isinstance(body, dict):
        raise wrong("body", "a JSON object", body)
    given = {name: value for name, value in body.items() if value is not None}
    refuse_unknown(given, fields)
    return {name: fields[name].check(name, value) for name, value in given.items()}
