"""Chunks -> server-sent events, in the shapes of OpenAI's streams.

A frame that adds nothing but text (almost all do) is put together from pieces made before; no frame is empty: tokens
whose text is held back (half a character, the beginning of a stop string) are told with the text that follows."""

from __future__ import annotations

import json

from jaxserve.request import Chunk
from jaxserve.streams import merge
from jaxserve.text import Tokenizer
from server.json_types import Json
from server.openai_response import OBJECTS, Logprobs, answer_id, finish_parts, prompt_parts, usage_of
from server.openai_schema import Asked

DONE = b"data: [DONE]\n\n"

encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(body: Json) -> bytes:
    return f"data: {encode(body)}\n\n".encode()


class Frames:
    """The frames of one call, in order."""

    def __init__(self, asked: Asked, *, model: str, created: int, tokenizer: Tokenizer):
        self._asked = asked
        kind = OBJECTS[asked.kind] + (".chunk" if asked.kind == "chat" else "")
        head: dict[str, Json] = {"id": answer_id(asked), "object": kind, "created": created, "model": model}
        self._head = f"data: {encode(head)[:-1]},"
        self._tail = (',"usage":null' if asked.include_usage else "") + "}\n\n"
        count = len(asked.requests) * asked.n
        self._choices = [_Choice(asked, place, self._head, self._tail, tokenizer) for place in range(count)]

    def of(self, position: int, chunk: Chunk) -> bytes:
        """What this chunk of a sample of prompt `position` adds; empty when it is not to be told yet."""
        return self._choices[position * self._asked.n + chunk.index].frame(chunk)

    def end(self) -> bytes:
        """After every sample's last chunk."""
        if not self._asked.include_usage:
            return DONE
        usage = usage_of(self._asked, [choice.last for choice in self._choices])
        return f'{self._head}"choices":[],"usage":{encode(usage)}}}\n\n'.encode() + DONE


class _Choice:
    """One choice of a stream: what it has told, and what it holds back."""

    def __init__(self, asked: Asked, place: int, head: str, tail: str, tokenizer: Tokenizer):
        self._asked = asked
        self._place = place
        self._position = place // asked.n
        self._tokenizer = tokenizer
        self._head = head
        self._tail = tail
        self._is_plain = asked.params.logprobs is None and not asked.wants_token_ids
        self._logprobs = Logprobs(asked, self._position, tokenizer)
        self._held: list[Chunk] = []
        self._is_first = True
        begin = '"delta":{"content":' if asked.kind == "chat" else '"text":'
        self._before_text = f'{head}"choices":[{{"index":{place},{begin}'
        end = "}" if asked.kind == "chat" else ""
        self._after_text = f'{end},"logprobs":null,"finish_reason":null}}]{tail}'
        self.last: Chunk = Chunk(request_id="")

    def frame(self, chunk: Chunk) -> bytes:
        if chunk.finish_reason is None:
            if not chunk.text:
                self._held.append(chunk)
                return b""
            if self._is_plain and not self._is_first:
                self._held.clear()
                return f"{self._before_text}{encode(chunk.text)}{self._after_text}".encode()
        else:
            self.last = chunk
        if self._held:
            chunk = merge([*self._held, chunk])
            self._held.clear()
        choice = self._choice(chunk)
        more = self._of_prompt(chunk) if self._asked.kind == "chat" else ""
        self._is_first = False
        return f'{self._head}{more}"choices":[{encode(choice)}]{self._tail}'.encode()

    def _choice(self, chunk: Chunk) -> dict[str, Json]:
        choice: dict[str, Json] = {"index": self._place}
        if self._asked.kind == "chat":
            delta: dict[str, Json] = {"role": "assistant"} if self._is_first else {}
            if chunk.text or self._is_first:
                delta["content"] = chunk.text or ""
            choice["delta"] = delta
        else:
            echo = self._asked.echoes[self._position] if self._asked.echoes and self._is_first else ""
            choice["text"] = echo + (chunk.text or "")
        choice["logprobs"] = self._logprobs.of(chunk)
        if self._asked.kind == "completion" and self._is_first:
            choice |= prompt_parts(self._asked, self._position, chunk, self._tokenizer)
        if self._asked.wants_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return choice | (finish_parts(chunk) if chunk.finish_reason else {"finish_reason": None})

    def _of_prompt(self, chunk: Chunk) -> str:
        """A chat's prompt is told with the first frame of all."""
        if self._place or not self._is_first:
            return ""
        parts = prompt_parts(self._asked, self._position, chunk, self._tokenizer)
        return "".join(f"{encode(name)}:{encode(part)}," for name, part in parts.items())
