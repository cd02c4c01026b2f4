"""OpenAI request bodies -> requests.  Strict: a field that is unknown, not supported or of a wrong type is refused by
name; none is ignored.

Knows no HTTP: a batch file's lines come through here as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.request import ErrorCode, Request, RequestError, SamplingParams
from jaxserve.text import Tokenizer
from server.json_types import Json, quote
from server.limits import MAX_PROMPTS, Limits, check_bytes
from server.openai_fields import FIELDS, SAMPLING, Kind, Prompt, checked
from server.prompts import chat_ids, text_ids

URLS: Mapping[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may use the whole context


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body, translated, and what the shape of its answer depends on.  Choice `position * n + index` is sample `index`
    of prompt `position`."""

    kind: Kind
    id: str
    requests: tuple[Request, ...]  # one per prompt, which differ in the prompt alone
    echoes: tuple[str, ...] | None  # the prompts' texts, to stand in front of the completions
    wants_prompt_logprobs: bool
    wants_token_ids: bool
    stream: bool
    include_usage: bool  # in a stream
    user: str | None  # whom the client serves, for the log

    @property
    def params(self) -> SamplingParams:
        return self.requests[0].params

    @property
    def n(self) -> int:
        return self.params.n


def asked_of(
    body: Json,
    kind: Kind,
    *,
    request_id: str,
    models: Sequence[str],
    tokenizer: Tokenizer,
    limits: Limits,
    now: float,
) -> Asked:
    """models: the names this server answers to; now: time.monotonic(), from which a timeout counts.  RequestError names
    the field at fault."""
    values: dict[str, Any] = checked(body, FIELDS[kind])
    check_model(values, models)
    check_bytes("cache_salt", values.get("cache_salt", ""), limits.max_id_bytes)
    check_bytes("user", values.get("user", ""), limits.max_id_bytes)
    if "stream_options" in values and not values.get("stream"):
        raise RequestError("stream_options needs stream: true", field="stream_options")
    params = _params(values, kind, limits)  # before the prompts: a wrong number should cost no tokenising
    if kind == "completion":
        prompts, texts = _completion_prompts(values, params.n, tokenizer, limits)
    else:
        prompts, texts = [_chat_prompt(values, tokenizer, limits)], [""]
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{position}" for position in range(len(prompts))]
    requests = [
        Request(
            id=each_id,
            prompt_ids=prompt_ids,
            params=params,
            priority=values.get("priority", 0),
            cache_salt=values.get("cache_salt", ""),
            deadline=now + values["timeout"] if "timeout" in values else None,
        )
        for each_id, prompt_ids in zip(ids, prompts, strict=True)
    ]
    return Asked(
        kind=kind,
        id=request_id,
        requests=tuple(requests),
        echoes=tuple(texts) if values.get("echo") else None,
        wants_prompt_logprobs="prompt_logprobs" in values,
        wants_token_ids=values.get("return_token_ids", False),
        stream=values.get("stream", False),
        include_usage=values.get("stream_options", {}).get("include_usage", False),
        user=values.get("user"),
    )


def check_model(values: Mapping[str, Any], models: Sequence[str]) -> None:
    if values.get("model", models[0]) not in models:
        sentence = f"model {quote(values['model'])} is not served here; this is {' or '.join(models)}"
        raise RequestError(sentence, code=ErrorCode.NOT_FOUND, field="model")


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


def _completion_prompts(
    values: Mapping[str, Any], n: int, tokenizer: Tokenizer, limits: Limits
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Ids of each prompt, and the texts they stand for."""
    if "prompt" not in values:
        raise RequestError("prompt is missing: give a text or a list of token ids", field="prompt")
    prompts: list[Prompt] = values["prompt"]
    if len(prompts) > MAX_PROMPTS or len(prompts) * n > limits.max_open_calls:
        sentence = (
            f"prompt holds {len(prompts)} prompts for n={n} samples each: this server takes {MAX_PROMPTS} prompts"
        )
        raise RequestError(f"{sentence} and {limits.max_open_calls} samples in one call", field="prompt")
    add_bos = None if values.get("add_special_tokens", True) else False
    check_bytes("prompt", "".join(each for each in prompts if isinstance(each, str)), limits.max_prompt_bytes)
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{position}]" for position in range(len(prompts))]
    ids = [
        _prompt_ids(name, prompt, tokenizer, limits, add_bos=add_bos)
        for name, prompt in zip(names, prompts, strict=True)
    ]
    wants_texts = values.get("echo", False)
    texts = [each if isinstance(each, str) else tokenizer.decode(each) if wants_texts else "" for each in prompts]
    return ids, texts


def _prompt_ids(
    name: str, prompt: Prompt, tokenizer: Tokenizer, limits: Limits, *, add_bos: bool | None
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        ids = text_ids(tokenizer, prompt, limits=limits, field=name, add_bos=add_bos)
        limits.check_prompt_len(name, len(ids))
        return ids
    if not prompt:
        raise RequestError(f"{name} is empty: it must hold at least one token", field=name)
    limits.check_prompt_len(name, len(prompt))
    check_ids(name, prompt, tokenizer)
    return tuple(prompt)


def check_ids(name: str, ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Before anything decodes them."""
    for token_id in ids:
        if not 0 <= token_id < tokenizer.vocab_size:
            last = tokenizer.vocab_size - 1
            raise RequestError(f"{name} holds {token_id}: token ids go from 0 to {last}", field=name)


def _chat_prompt(values: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> tuple[int, ...]:
    if "messages" not in values:
        raise RequestError("messages is missing: a chat needs at least one message", field="messages")
    generation = values.get("add_generation_prompt", True)
    return chat_ids(tokenizer, values["messages"], limits=limits, add_generation_prompt=generation)
