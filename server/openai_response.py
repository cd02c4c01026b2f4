"""Finished samples -> OpenAI response bodies.  Where OpenAI has no place for something, vLLM's name is used."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from jaxserve.request import Chunk, TokenLogprobs, Usage
from jaxserve.text import Tokenizer
from server.json_types import Json
from server.openai_fields import Kind
from server.openai_schema import Asked
from server.openai_tools import message_parts

OBJECTS: Mapping[Kind, str] = {"completion": "text_completion", "chat": "chat.completion"}


def answer_id(asked: Asked) -> str:
    return ("chatcmpl-" if asked.kind == "chat" else "cmpl-") + asked.id


def body_of(
    asked: Asked, samples: Sequence[Chunk], *, model: str, created: int, tokenizer: Tokenizer
) -> dict[str, Json]:
    """samples: one whole Chunk (all of its text, tokens, logprobs) per choice, each finished; created: Unix seconds."""
    body: dict[str, Json] = {
        "id": answer_id(asked),
        "object": OBJECTS[asked.kind],
        "created": created,
        "model": model,
        "choices": [_choice(asked, place, sample, tokenizer) for place, sample in enumerate(samples)],
        "usage": usage_of(asked, samples),
    }
    if asked.kind == "chat":
        body |= prompt_parts(asked, 0, samples[0], tokenizer)
    return body


def _choice(asked: Asked, place: int, sample: Chunk, tokenizer: Tokenizer) -> dict[str, Json]:
    position = place // asked.n
    choice: dict[str, Json] = {"index": place}
    ending: dict[str, Json] = {}
    if asked.kind == "chat":
        message, ending = message_parts(asked.tools and asked.tools.reader(), sample)
        choice["message"] = {"role": "assistant", **message}
    else:
        choice["text"] = (asked.echoes[position] if asked.echoes else "") + (sample.text or "")
    choice["logprobs"] = Logprobs(asked, position, tokenizer).of(sample)
    if asked.kind == "completion":
        choice |= prompt_parts(asked, position, sample, tokenizer)
    if asked.wants_token_ids:
        choice["token_ids"] = list(sample.token_ids)
    return choice | finish_parts(sample) | ending


def finish_parts(sample: Chunk) -> dict[str, Json]:
    """How a choice ended; the seed (given or drawn) with which its call gives the same answer again."""
    assert sample.finish_reason is not None, "a choice ends with a finished sample"
    return {"finish_reason": sample.finish_reason.value, "stop_reason": sample.stop_reason, "seed": sample.seed}


def prompt_parts(asked: Asked, position: int, chunk: Chunk, tokenizer: Tokenizer) -> dict[str, Json]:
    """What was asked for of the prompt itself: in every choice of a completion, once for a chat."""
    parts: dict[str, Json] = {}
    if asked.wants_prompt_logprobs:
        parts["prompt_logprobs"] = [entry and _by_id(entry, tokenizer) for entry in chunk.prompt_logprobs or ()]
    if asked.wants_token_ids:
        parts["prompt_token_ids"] = list(asked.requests[position].prompt_ids)
    return parts


def usage_of(asked: Asked, samples: Sequence[Chunk]) -> dict[str, Json]:
    """A prompt counts once, however many samples it has; samples: the last chunk, or the whole, of each choice.
    Drafts are told under OpenAI's names for predicted outputs, when there were any."""
    usages = [sample.usage or Usage() for sample in samples]
    prompt = sum(usage.prompt_tokens for usage in usages[:: asked.n])
    completion = sum(usage.completion_tokens for usage in usages)
    told: dict[str, Json] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages[:: asked.n])},
    }
    drafted = sum(usage.drafted_tokens for usage in usages)
    if drafted:
        accepted = sum(usage.accepted_tokens for usage in usages)
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return told


class Logprobs:
    """A choice's logprobs in its call's form, part after part of a stream or as a whole."""

    def __init__(self, asked: Asked, position: int, tokenizer: Tokenizer):
        self._asked = asked
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # of the text so far
        # with echo the prompt's tokens come first, the very first without a logprob
        self._echoed: Sequence[int] = asked.requests[position].prompt_ids if asked.echoes else ()

    def of(self, chunk: Chunk) -> Json:
        """None when they were not asked for."""
        if self._asked.params.logprobs is None:
            return None
        entries = chunk.logprobs or ()
        if self._asked.kind == "chat":
            return {"content": [_chat_entry(entry, self._tokenizer) for entry in entries]}
        ids = [*self._echoed, *chunk.token_ids]
        both = [*(chunk.prompt_logprobs or ()), *entries] if self._echoed else entries
        self._echoed = ()
        return {
            "tokens": [_name(token_id, self._tokenizer) for token_id in ids],
            "token_logprobs": [entry and entry.logprob for entry in both],
            "top_logprobs": [entry and _top(entry, self._tokenizer) for entry in both],
            "text_offset": [self._offset(token_id) for token_id in ids],
        }

    def _offset(self, token_id: int) -> int:
        """Where the token begins, in characters."""
        begin = self._length
        self._length += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return begin


def _chat_entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Json]:
    def named(token_id: int, logprob: float) -> dict[str, Json]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    top: list[Json] = [named(token_id, logprob) for token_id, logprob in entry.top]
    return {**named(entry.token_id, entry.logprob), "top_logprobs": top}


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


def _by_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Json]:
    """Token id -> logprob, rank, text."""
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
    ranked.append((entry.token_id, entry.logprob, entry.rank))
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": _name(token_id, tokenizer)}
        for token_id, logprob, rank in ranked
    }
