"""Texts and token ids over HTTP: vLLM's /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.request import RequestError
from server.backend import Backend
from server.http_generate import model_names
from server.json_types import Field, Json, load_json
from server.limits import Limits
from server.openai_fields import BOOLEAN, FIELDS, IDS, TEXT, checked
from server.openai_schema import check_ids, check_model
from server.prompts import chat_ids, text_ids

TOKENIZE: Mapping[str, Field] = {
    "model": TEXT,
    "prompt": TEXT,
    "messages": FIELDS["chat"]["messages"],
    "add_special_tokens": BOOLEAN,
    "add_generation_prompt": BOOLEAN,
    "return_token_strs": BOOLEAN,
}
DETOKENIZE: Mapping[str, Field] = {"model": TEXT, "tokens": IDS, "skip_special_tokens": BOOLEAN}


def tokenized(raw: bytes, backend: Backend, limits: Limits) -> dict[str, Json]:
    """A prompt's ids as a completion would have them, or a chat's.  Runs in a worker thread."""
    values = _values(raw, TOKENIZE, backend)
    if ("prompt" in values) == ("messages" in values):
        raise RequestError("give a prompt or messages, one of the two", field="prompt")
    if "prompt" in values:
        _refuse(values, "add_generation_prompt", "messages")
        add_bos = None if values.get("add_special_tokens", True) else False
        text = values["prompt"]
        ids = text_ids(backend.tokenizer, text, limits=limits, field="prompt", add_bos=add_bos)
    else:
        _refuse(values, "add_special_tokens", "a prompt; a chat's template decides")
        generation = values.get("add_generation_prompt", True)
        ids = chat_ids(backend.tokenizer, values["messages"], limits=limits, add_generation_prompt=generation)
    strings: list[Json] | None = None
    if values.get("return_token_strs"):
        strings = [backend.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in ids]
    return {"count": len(ids), "max_model_len": backend.info.max_len, "tokens": list(ids), "token_strs": strings}


def detokenized(raw: bytes, backend: Backend, limits: Limits) -> dict[str, Json]:
    """Runs in a worker thread."""
    values = _values(raw, DETOKENIZE, backend)
    if "tokens" not in values:
        raise RequestError("tokens is missing: give a list of token ids", field="tokens")
    ids = values["tokens"]
    if len(ids) > limits.max_len:
        raise RequestError(f"tokens holds {len(ids)} ids, this server takes {limits.max_len}", field="tokens")
    check_ids("tokens", ids, backend.tokenizer)
    return {"prompt": backend.tokenizer.decode(ids, skip_special=values.get("skip_special_tokens", False))}


def tokenizer_info(backend: Backend) -> dict[str, Json]:
    """What a client needs to build the same prompts by itself."""
    tokenizer = backend.tokenizer
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    bos, eos = tokenizer.bos_id, tokenizer.eos_ids
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": backend.info.max_len,
        "add_bos_token": tokenizer.adds_bos,
        "bos_token": None if bos is None else names.get(bos),
        "bos_token_id": bos,
        "eos_token": names.get(eos[0]) if eos else None,
        "eos_token_ids": list(eos),
        "special_tokens": dict(tokenizer.special_tokens),
        "chat_template": tokenizer.chat_template,
    }


def _values(raw: bytes, fields: Mapping[str, Field], backend: Backend) -> dict[str, Any]:
    values = checked(load_json(raw, "the body"), fields)
    check_model(values, model_names(backend))
    return values


def _refuse(values: Mapping[str, Any], name: str, mate: str) -> None:
    if name in values:
        raise RequestError(f"{name} goes with {mate}", field=name)
