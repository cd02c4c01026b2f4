"""OpenAI request bodies -> Request.  Strict: a field that is unknown, not supported or of a wrong type is refused by
name; none is ignored.

Names that OpenAI does not have are vLLM's.  `null` is the same as leaving a field out.  Knows no HTTP: a batch file's
lines come through here as well."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.request import ErrorCode, Request, RequestError, SamplingParams
from jaxserve.text import Tokenizer
from server.json_types import Check, Json, biases, boolean, integer, integers, number, quote, text, texts, wrong
from server.limits import Limits, check_bytes
from server.prompts import chat_ids, text_ids

Kind = Literal["completion", "chat"]

URLS: Mapping[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may use the whole context
MESSAGE_FIELDS = ("role", "content")


def prompt_value(name: str, value: Json) -> str | list[int]:
    if isinstance(value, str):
        return text(name, value)
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        raise RequestError("prompt must be one text or one list of token ids: send one request per prompt", field=name)
    if not isinstance(value, list):
        raise wrong(name, "a text or a list of token ids", value)
    return integers(name, value)


def message_list(name: str, value: Json) -> list:
    """What stands in the messages is checked where the template is rendered."""
    if not isinstance(value, list):
        raise wrong(name, "a list of messages", value)
    for index, message in enumerate(value):
        if isinstance(message, dict):
            refuse_unknown(message, MESSAGE_FIELDS, where=f"{name}[{index}].")
    return value


# SamplingParams' fields that bodies name and type alike.
SAMPLING: Mapping[str, Check] = {
    "min_tokens": integer,
    "n": integer,
    "temperature": number,
    "top_k": integer,
    "top_p": number,
    "min_p": number,
    "presence_penalty": number,
    "frequency_penalty": number,
    "repetition_penalty": number,
    "logit_bias": biases,
    "allowed_token_ids": integers,
    "banned_token_ids": integers,
    "seed": integer,
    "stop": texts,
    "stop_token_ids": integers,
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "skip_special_tokens": boolean,
    "speculate": boolean,
    "prompt_logprobs_start": integer,
}
COMMON: Mapping[str, Check] = {
    **SAMPLING,
    "model": text,
    "max_tokens": integer,
    "prompt_logprobs": integer,
    "stream": boolean,
    "priority": integer,
    "cache_salt": text,
    "return_token_ids": boolean,
}
FIELDS: Mapping[Kind, Mapping[str, Check]] = {
    "completion": {**COMMON, "prompt": prompt_value, "echo": boolean, "logprobs": integer},
    "chat": {
        **COMMON,
        "messages": message_list,
        "max_completion_tokens": integer,
        "logprobs": boolean,
        "top_logprobs": integer,
        "add_generation_prompt": boolean,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body, translated, and what the shape of its answer depends on."""

    kind: Kind
    request: Request
    echo: str | None  # the prompt's text, to stand in front of the completion
    wants_prompt_logprobs: bool
    wants_token_ids: bool


def asked_of(
    body: Json, kind: Kind, *, request_id: str, models: Sequence[str], tokenizer: Tokenizer, limits: Limits
) -> Asked:
    """models: the names this server answers to.  RequestError names the field at fault."""
    if not isinstance(body, dict):
        raise wrong("body", "a JSON object", body)
    given = {name: value for name, value in body.items() if value is not None}
    refuse_unknown(given, FIELDS[kind])
    values: dict[str, Any] = {name: FIELDS[kind][name](name, value) for name, value in given.items()}
    if values.get("model", models[0]) not in models:
        sentence = f"model {quote(values['model'])} is not served here; this is {' or '.join(models)}"
        raise RequestError(sentence, code=ErrorCode.NOT_FOUND, field="model")
    if values.get("stream"):
        raise RequestError("stream must be false: this answer comes as a whole", field="stream")
    check_bytes("cache_salt", values.get("cache_salt", ""), limits.max_id_bytes)
    params = _params(values, kind, limits)
    if kind == "completion":
        prompt_ids, prompt_text = _completion_prompt(values, tokenizer, limits)
    else:
        prompt_ids, prompt_text = _chat_prompt(values, tokenizer, limits), ""
    request = Request(
        id=request_id,
        prompt_ids=prompt_ids,
        params=params,
        priority=values.get("priority", 0),
        cache_salt=values.get("cache_salt", ""),
    )
    return Asked(
        kind=kind,
        request=request,
        echo=prompt_text if values.get("echo") else None,
        wants_prompt_logprobs="prompt_logprobs" in values,
        wants_token_ids=values.get("return_token_ids", False),
    )


def _params(values: Mapping[str, Any], kind: Kind, limits: Limits) -> SamplingParams:
    same: dict[str, Any] = {name: values[name] for name in SAMPLING if name in values}
    limits.check_lists(same)
    prompt_logprobs = values.get("prompt_logprobs")
    if kind == "chat":
        logprobs = _chat_logprobs(values)
    else:
        logprobs = values.get("logprobs")
        if values.get("echo") and logprobs is not None and prompt_logprobs is None:
            prompt_logprobs = logprobs
    return SamplingParams(
        max_tokens=_max_tokens(values, kind), logprobs=logprobs, prompt_logprobs=prompt_logprobs, **same
    )


def _max_tokens(values: Mapping[str, Any], kind: Kind) -> int | None:
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError("max_tokens and max_completion_tokens differ: give one", field="max_completion_tokens")
    if old is None and new is None:
        return COMPLETION_MAX_TOKENS if kind == "completion" else None
    return old if new is None else new


def _chat_logprobs(values: Mapping[str, Any]) -> int | None:
    if "top_logprobs" in values and not values.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    return values.get("top_logprobs", 0) if values.get("logprobs") else None


def _completion_prompt(values: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> tuple[tuple[int, ...], str]:
    """Ids, and the text they stand for."""
    if "prompt" not in values:
        raise RequestError("prompt is missing: give a text or a list of token ids", field="prompt")
    prompt = values["prompt"]
    if isinstance(prompt, str):
        return text_ids(tokenizer, prompt, limits=limits, field="prompt"), prompt
    if not prompt:
        raise RequestError("prompt is empty: it must hold at least one token", field="prompt")
    limits.check_prompt_len("prompt", len(prompt))
    for token_id in prompt:
        if not 0 <= token_id < tokenizer.vocab_size:
            last = tokenizer.vocab_size - 1
            raise RequestError(f"prompt holds {token_id}: token ids go from 0 to {last}", field="prompt")
    return tuple(prompt), tokenizer.decode(prompt)


def _chat_prompt(values: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> tuple[int, ...]:
    if "messages" not in values:
        raise RequestError("messages is missing: a chat needs at least one message", field="messages")
    generation = values.get("add_generation_prompt", True)
    return chat_ids(tokenizer, values["messages"], limits=limits, add_generation_prompt=generation)


def refuse_unknown(given: Mapping[str, Json], known: Collection[str], where: str = "") -> None:
    for name in given:
        if name not in known:
            field = where + (name if name.isidentifier() and len(name) <= 60 else quote(name))
            raise RequestError(f"{field} is not a field that this server supports", field=field)
