"""Protobuf messages to plain requests, and chunks to protobuf messages.

Fields are matched by name: a field of SamplingParams that the proto has is passed on, one that this build does not know
is refused, so none is ever ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.request import Chunk, FinishReason, Request, RequestError, SamplingParams, TokenLogprobs
from jaxserve.text import Tokenizer
from server.backend import Backend, Numbers
from server.limits import Limits, check_bytes
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.prompts import chat_ids, text_ids

REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def request_of(
    message: pb.GenerateRequest, *, request_id: str, deadline: float | None, tokenizer: Tokenizer, limits: Limits
) -> Request:
    """deadline: time.monotonic() seconds.  RequestError names the field at fault."""
    refuse_unknown(message, "request")
    check_bytes("cache_salt", message.cache_salt, limits.max_id_bytes)
    params = params_of(message.params, limits)  # before the prompt: a wrong number should cost no tokenising
    return Request(
        id=request_id,
        prompt_ids=prompt_ids_of(message, tokenizer, limits),
        params=params,
        priority=message.priority,
        cache_salt=message.cache_salt,
        deadline=deadline,
    )


def params_of(message: pb.SamplingParams, limits: Limits) -> SamplingParams:
    """Every field that is set, under its own name; the others keep SamplingParams' defaults."""
    refuse_unknown(message, "params")
    given = {descriptor.name: value for descriptor, value in message.ListFields()}
    limits.check_lists(given)
    plain: dict[str, Any] = {name: _plain(value) for name, value in given.items()}
    return SamplingParams(**plain)


def _plain(value):
    """A protobuf container as a plain dict or tuple."""
    if isinstance(value, int | float | str):
        return value
    return dict(value) if isinstance(value, Mapping) else tuple(value)


def prompt_ids_of(
    message: pb.GenerateRequest | pb.TokenizeRequest,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    add_bos: bool | None = None,
) -> tuple[int, ...]:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return text_ids(tokenizer, message.text, limits=limits, field="text", add_bos=add_bos)
    if kind == "chat":
        refuse_unknown(message.chat, "chat")
        for each in message.chat.messages:
            refuse_unknown(each, "chat.messages")
        return chat_ids(
            tokenizer,
            [{"role": each.role, "content": each.content} for each in message.chat.messages],
            limits=limits,
            add_generation_prompt=default(message.chat, "add_generation_prompt", True),
        )
    if isinstance(message, pb.GenerateRequest) and kind == "token_ids":
        refuse_unknown(message.token_ids, "token_ids")
        if not message.token_ids.ids:
            raise RequestError("token_ids is empty: a prompt must hold at least one token", field="token_ids")
        limits.check_prompt_len("token_ids", len(message.token_ids.ids))
        return tuple(message.token_ids.ids)
    kinds = ", ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["prompt"].fields)
    raise RequestError(f"the prompt is missing: give one of {kinds}", field="prompt")


def default(message: Message, name: str, value: bool) -> bool:
    """An optional bool, or `value` when it is not set."""
    return getattr(message, name) if message.HasField(name) else value


def refuse_unknown(message: Message, where: str) -> None:
    """A newer client's field would otherwise be dropped without a word."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise RequestError(f"{where} has a field with number {number}, which this server does not know", field=where)


def output_of(chunk: Chunk, tokenizer: Tokenizer) -> pb.Output:
    output = pb.Output(id=chunk.request_id, index=chunk.index, text=chunk.text or "", token_ids=chunk.token_ids)
    if chunk.logprobs:
        output.logprobs.extend(_logprobs(entry, tokenizer) for entry in chunk.logprobs)
    if chunk.prompt_logprobs:
        output.prompt_logprobs.extend(_logprobs(entry, tokenizer) for entry in chunk.prompt_logprobs)
    if chunk.finish_reason is not None:
        output.finish.CopyFrom(_finish(chunk, chunk.finish_reason))
    return output


def _finish(chunk: Chunk, reason: FinishReason) -> pb.Finish:
    finish = pb.Finish(reason=REASONS[reason], error=chunk.error or "", seed=(chunk.seed or 0) % 2**64)
    if isinstance(chunk.stop_reason, str):
        finish.stop_string = chunk.stop_reason
    elif chunk.stop_reason is not None:
        finish.stop_id = chunk.stop_reason
    if chunk.usage is not None:
        for field in fields(chunk.usage):
            setattr(finish, field.name, getattr(chunk.usage, field.name))
    return finish


def _logprobs(entry: TokenLogprobs | None, tokenizer: Tokenizer) -> pb.TokenLogprobs:
    if entry is None:
        return pb.TokenLogprobs()
    return pb.TokenLogprobs(
        logprob=entry.logprob,
        token_id=entry.token_id,
        rank=entry.rank,
        token_bytes=tokenizer.token_bytes(entry.token_id),
        top_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
        top_bytes=[tokenizer.token_bytes(token_id) for token_id, _ in entry.top],
    )


def model_info_of(backend: Backend, limits: Limits) -> pb.ModelInfoResponse:
    tokenizer = backend.tokenizer
    response = pb.ModelInfoResponse(eos_ids=tokenizer.eos_ids, has_chat_template=tokenizer.chat_template is not None)
    if tokenizer.bos_id is not None:
        response.bos_id = tokenizer.bos_id
    for source in (backend.info, limits):
        _copy_by_name(source, response)
    return response


def load_of(load: Numbers) -> pb.LoadResponse:
    response = pb.LoadResponse()
    _copy_by_name(load, response)
    return response


def _copy_by_name(source: Numbers, message: Message) -> None:
    """Every field of a dataclass into the message's field of that name."""
    for field in fields(source):
        value = getattr(source, field.name)
        if isinstance(value, tuple):
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, value)
