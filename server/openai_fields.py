"""The fields of OpenAI's request bodies: what checks each value, and the JSON schema that tells of it.

The one place where a field is added.  Names that OpenAI does not have are vLLM's.  A field that is not here is refused
by name; so is a value here that asks for what this server does not do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from jaxserve.request import INT32_MAX, MAX_LOGPROBS, MAX_SAMPLES, RequestError
from server.json_types import (
    Check,
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

Kind = Literal["completion", "chat"]

MESSAGE_FIELDS = ("role", "content")
PART_FIELDS = ("type", "text")

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


def ranged(check: Check, kind: str, low: float, high: float) -> Field:
    """The bounds are SamplingParams' own, told here to the schema's readers."""
    return Field(check, {"type": kind, "minimum": low, "maximum": high})


BOOLEAN = Field(boolean, {"type": "boolean"})
TEXT = Field(text, {"type": "string"})
TOKEN_IDS: Mapping[str, Json] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}
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
    "allowed_token_ids": IDS,
    "banned_token_ids": IDS,
    "seed": ranged(integer, "integer", -(2**63), 2**64 - 1),
    "stop": Field(
        texts,
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
            ]
        },
    ),
    "stop_token_ids": IDS,
    "include_stop_str_in_output": BOOLEAN,
    "ignore_eos": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "speculate": BOOLEAN,
    "prompt_logprobs_start": COUNT,
}
COMMON: Mapping[str, Field] = {
    **SAMPLING,
    "model": TEXT,
    "max_tokens": COUNT,
    "prompt_logprobs": LOGPROBS,
    "stream": BOOLEAN,
    "stream_options": Field(
        stream_options,
        {"type": "object", "properties": {"include_usage": {"type": "boolean"}}, "additionalProperties": False},
    ),
    "priority": ranged(integer, "integer", -(2**31), INT32_MAX),
    "cache_salt": TEXT,
    "return_token_ids": BOOLEAN,
    "timeout": Field(seconds, {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT}),
    "user": TEXT,
}
FIELDS: Mapping[Kind, Mapping[str, Field]] = {
    "completion": {
        **COMMON,
        "prompt": Field(
            prompts,
            {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {**TOKEN_IDS, "minItems": 1},
                    {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                    {"type": "array", "minItems": 1, "items": {**TOKEN_IDS, "minItems": 1}},
                ]
            },
        ),
        "echo": BOOLEAN,
        "logprobs": LOGPROBS,
        "add_special_tokens": BOOLEAN,
    },
    "chat": {
        **COMMON,
        "messages": Field(
            messages,
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["role", "content"],
                    "additionalProperties": False,
                    "properties": {
                        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                        "content": {
                            "anyOf": [
                                {"type": "string"},
                                {
                                    "type": "array",
                                    "minItems": 1,
                                    "items": {
                                        "type": "object",
                                        "required": ["type", "text"],
                                        "additionalProperties": False,
                                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                                    },
                                },
                            ]
                        },
                    },
                },
            },
        ),
        "max_completion_tokens": COUNT,
        "logprobs": BOOLEAN,
        "top_logprobs": LOGPROBS,
        "add_generation_prompt": BOOLEAN,
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
