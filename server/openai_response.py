"""Finished samples -> OpenAI response bodies.  Where OpenAI has no place for something, vLLM's name is used."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxserve.request import Chunk, TokenLogprobs
from jaxserve.text import Tokenizer
from server.json_types import Json
from server.openai_schema import Asked

PromptLogprobs = Sequence[TokenLogprobs | None] | None


def body_of(
    asked: Asked, samples: Sequence[Chunk], *, model: str, created: int, tokenizer: Tokenizer
) -> dict[str, Json]:
    """samples: one whole Chunk (all of its text, tokens, logprobs) per index, each finished; created: Unix seconds."""
    is_chat = asked.kind == "chat"
    prompt_logprobs = samples[0].prompt_logprobs  # every sample has the same prompt
    choices = [_choice(asked, sample, prompt_logprobs, tokenizer) for sample in samples]
    body: dict[str, Json] = {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + asked.request.id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": _usage(samples),
        "seed": samples[0].seed,
    }
    if asked.wants_prompt_logprobs and is_chat:
        body["prompt_logprobs"] = _prompt_logprobs(prompt_logprobs, tokenizer)
    if asked.wants_token_ids and is_chat:
        body["prompt_token_ids"] = list(asked.request.prompt_ids)
    return body


def _choice(asked: Asked, sample: Chunk, prompt_logprobs: PromptLogprobs, tokenizer: Tokenizer) -> dict[str, Json]:
    assert sample.finish_reason is not None, "a choice is made of a finished sample"
    choice: dict[str, Json] = {
        "index": sample.index,
        "finish_reason": sample.finish_reason.value,
        "stop_reason": sample.stop_reason,
        "logprobs": None,
    }
    if asked.kind == "chat":
        choice["message"] = {"role": "assistant", "content": sample.text or ""}
        if sample.logprobs is not None:
            choice["logprobs"] = {"content": [_chat_entry(entry, tokenizer) for entry in sample.logprobs]}
    else:
        choice["text"] = (asked.echo or "") + (sample.text or "")
        if sample.logprobs is not None or asked.request.params.logprobs is not None:
            choice["logprobs"] = _completion_logprobs(asked, sample, prompt_logprobs, tokenizer)
        if asked.wants_prompt_logprobs:
            choice["prompt_logprobs"] = _prompt_logprobs(prompt_logprobs, tokenizer)
        if asked.wants_token_ids:
            choice["prompt_token_ids"] = list(asked.request.prompt_ids)
    if asked.wants_token_ids:
        choice["token_ids"] = list(sample.token_ids)
    return choice


def _usage(samples: Sequence[Chunk]) -> dict[str, Json]:
    usages = [sample.usage for sample in samples if sample.usage is not None]
    prompt, completion = usages[0].prompt_tokens, sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
    }


def _chat_entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Json]:
    def named(token_id: int, logprob: float) -> dict[str, Json]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    top: list[Json] = [named(token_id, logprob) for token_id, logprob in entry.top]
    return {**named(entry.token_id, entry.logprob), "top_logprobs": top}


def _completion_logprobs(
    asked: Asked, sample: Chunk, prompt_logprobs: PromptLogprobs, tokenizer: Tokenizer
) -> dict[str, Json]:
    """Parallel lists; with echo the prompt's tokens come first, the very first without a logprob."""
    entries: list[TokenLogprobs | None] = list(sample.logprobs or ())
    ids = list(sample.token_ids)
    if asked.echo is not None:
        entries = [*(prompt_logprobs or ()), *entries]
        ids = [*asked.request.prompt_ids, *ids]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], 0
    for token_id in ids:
        offsets.append(length)
        length += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return {
        "tokens": [_name(token_id, tokenizer) for token_id in ids],
        "token_logprobs": [entry and entry.logprob for entry in entries],
        "top_logprobs": [entry and _top(entry, tokenizer) for entry in entries],
        "text_offset": offsets,
    }


def _top(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Json]:
    """The most likely tokens and the one that stands there, by name; ids that share a name stay two entries."""
    top: dict[str, Json] = {}
    for token_id, logprob in dict([*entry.top, (entry.token_id, entry.logprob)]).items():
        name = _name(token_id, tokenizer)
        top[f"token_id:{token_id}" if name in top else name] = logprob
    return top


def _name(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text, or as OpenAI does its bytes when they are no text alone."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _prompt_logprobs(entries: PromptLogprobs, tokenizer: Tokenizer) -> list[Json]:
    """Per position: null, or token id -> logprob, rank, text."""
    return [entry and _by_id(entry, tokenizer) for entry in entries or ()]


def _by_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Json]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
    ranked.append((entry.token_id, entry.logprob, entry.rank))
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": _name(token_id, tokenizer)}
        for token_id, logprob, rank in ranked
    }
