"""The OpenAPI document of the HTTP front: bodies told by the same tables that check them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.http_text import DETOKENIZE, TOKENIZE
from server.json_schema import (
    BOOLEAN,
    COUNT,
    INTEGER,
    NUMBER,
    STRING,
    Schema,
    any_of,
    array_of,
    nullable,
    object_of,
)
from server.json_types import Field, Json
from server.openai_fields import FIELDS, REQUIRED, Kind
from server.openai_tools import TOOL_CALLS

ERRORS = {
    400: "A field or a combination of fields that this server cannot honour; error.param names it",
    404: "No such model",
    408: "The body did not come in time, or the call's own timeout passed before it ended",
    413: "The body is over the limit",
    415: "The body is not said to be JSON",
    429: "The queue is full: try again after retry-after seconds",
    499: "The request was aborted",
    500: "The server's own fault",
    503: "The model is loading, or the server is shutting down",
}
TEXT_ERRORS = (400, 404, 408, 413, 415, 500, 503)


def document() -> dict[str, Json]:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": "1", "description": "OpenAI's API, and vLLM's where OpenAI has none."},
        "paths": {
            "/v1/completions": _generate("completion", "Continue prompts.", COMPLETION),
            "/v1/chat/completions": _generate("chat", "Answer a conversation.", CHAT),
            "/v1/models": {"get": _operation("The model that is served.", MODELS, errors=(500, 503))},
            "/v1/models/{name}": {
                "get": {
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                    **_operation("One model.", MODEL, errors=(404, 500, 503)),
                }
            },
            "/tokenize": _post(TOKENIZE, (), "A prompt's token ids, or a chat's.", TOKENS),
            "/detokenize": _post(DETOKENIZE, ("tokens",), "The text of token ids.", object_of(prompt=STRING)),
            "/tokenizer_info": {
                "get": _operation("What a client needs to build prompts by itself.", TOKENIZER, errors=(500, 503))
            },
            "/health": {"get": _state("The engine's loop beats.")},
            "/ready": {"get": _state("Requests are taken.")},
            "/metrics": {"get": _texts("Numbers for scrapers.", "text/plain", "application/openmetrics-text")},
            "/": {"get": _texts("A page to chat and to see the gauges.", "text/html")},
        },
    }


def body_schema(fields: Mapping[str, Field], required: Sequence[str]) -> dict[str, Json]:
    """null is the same as leaving a field out."""
    optional = {name: nullable(field.schema) for name, field in fields.items() if name not in required}
    return object_of(optional, **{name: fields[name].schema for name in required})


ERROR = object_of(
    error=object_of(message=STRING, type=STRING, param=nullable(STRING), code=STRING),
)
USAGE = object_of(
    {"completion_tokens_details": object_of(accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT)},
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=object_of(cached_tokens=COUNT),
)
TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": array_of(COUNT)}
CHAT_LOGPROBS = object_of(content=array_of(object_of(**TOKEN, top_logprobs=array_of(object_of(**TOKEN)))))
COMPLETION_LOGPROBS = object_of(
    tokens=array_of(STRING),
    token_logprobs=array_of(nullable(NUMBER)),
    top_logprobs=array_of(nullable({"type": "object", "additionalProperties": NUMBER})),
    text_offset=array_of(COUNT),
)
PROMPT_LOGPROBS = array_of(
    nullable(
        {"type": "object", "additionalProperties": object_of(logprob=NUMBER, rank=COUNT, decoded_token=STRING)},
    )
)
CHOICE = {
    "index": COUNT,
    "finish_reason": {"enum": ["stop", "length"]},
    "stop_reason": {"type": ["string", "integer", "null"]},
    "seed": INTEGER,
}
OF_PROMPT = {"prompt_logprobs": PROMPT_LOGPROBS, "prompt_token_ids": array_of(COUNT)}
TOKEN_IDS = {"token_ids": array_of(COUNT)}
ANSWER = {"id": STRING, "created": COUNT, "model": STRING, "usage": USAGE}
COMPLETION = object_of(
    **ANSWER,
    object={"const": "text_completion"},
    choices=array_of(
        object_of({**OF_PROMPT, **TOKEN_IDS}, **CHOICE, text=STRING, logprobs=nullable(COMPLETION_LOGPROBS)),
    ),
)
CHAT = object_of(
    OF_PROMPT,
    **ANSWER,
    object={"const": "chat.completion"},
    choices=array_of(
        object_of(
            TOKEN_IDS,
            **CHOICE | {"finish_reason": {"enum": ["stop", "length", "tool_calls"]}},
            message=any_of(
                object_of(role={"const": "assistant"}, content=STRING),
                object_of(role={"const": "assistant"}, content=nullable(STRING), tool_calls=TOOL_CALLS),
            ),
            logprobs=nullable(CHAT_LOGPROBS),
        ),
    ),
)
MODEL = object_of(
    id=STRING,
    object={"const": "model"},
    created=COUNT,
    owned_by=STRING,
    max_model_len=COUNT,
    limits={"type": "object", "additionalProperties": COUNT},
)
MODELS = object_of(object={"const": "list"}, data=array_of(MODEL))
TOKENS = object_of(
    count=COUNT, max_model_len=COUNT, tokens=array_of(COUNT), token_strs=nullable(array_of(STRING))
)  # fmt: skip
TOKENIZER = object_of(
    tokenizer_class=STRING,
    vocab_size=COUNT,
    model_max_length=COUNT,
    add_bos_token=BOOLEAN,
    bos_token=nullable(STRING),
    bos_token_id=nullable(COUNT),
    eos_token=nullable(STRING),
    eos_token_ids=array_of(COUNT),
    special_tokens={"type": "object", "additionalProperties": COUNT},
    chat_template=nullable(STRING),
)


# One event of a stream: data is the JSON of a chunk or of an error, or the word [DONE].
EVENT = {"type": "object", "required": ["data"], "properties": {"data": STRING}}


def _operation(
    summary: str, answer: Schema, *, errors: Sequence[int], more: Mapping[str, Schema] | None = None
) -> dict[str, Json]:
    """more: other content types that the answer may have."""
    responses: dict[str, Json] = {"200": _response("Done", {"application/json": answer, **(more or {})})}
    for status in errors:
        responses[str(status)] = _response(ERRORS[status], {"application/json": ERROR})
    return {"summary": summary, "responses": responses}


def _response(description: str, content: Mapping[str, Schema]) -> dict[str, Json]:
    return {"description": description, "content": {kind: {"schema": dict(schema)} for kind, schema in content.items()}}


def _body(fields: Mapping[str, Field], required: Sequence[str]) -> dict[str, Json]:
    return {"required": True, "content": {"application/json": {"schema": body_schema(fields, required)}}}


def _post(fields: Mapping[str, Field], required: Sequence[str], summary: str, answer: Schema) -> dict[str, Json]:
    return {"post": {"requestBody": _body(fields, required), **_operation(summary, answer, errors=TEXT_ERRORS)}}


def _generate(kind: Kind, summary: str, answer: Schema) -> dict[str, Json]:
    """With stream: true the answer is a text of server-sent events."""
    operation = _operation(summary, answer, errors=tuple(ERRORS), more={"text/event-stream": EVENT})
    return {"post": {"requestBody": _body(FIELDS[kind], (REQUIRED[kind],)), **operation}}


def _texts(summary: str, *kinds: str) -> dict[str, Json]:
    """kinds: content types, of which the client's accept header chooses."""
    return {"summary": summary, "responses": {"200": _response("Done", dict.fromkeys(kinds, STRING))}}


def _state(summary: str) -> dict[str, Json]:
    states = {"application/json": object_of(status=STRING)}
    return {"summary": summary, "responses": {"200": _response("Yes", states), "503": _response("No", states)}}
