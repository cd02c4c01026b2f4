"""Texts and chats to token ids, within the stated limits.  Runs in worker threads, never on the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxserve.request import RequestError
from jaxserve.text import Tokenizer
from jaxserve.text.chat import render_chat
from server.limits import Limits, check_bytes


def text_ids(
    tokenizer: Tokenizer, text: str, *, limits: Limits, field: str, add_bos: bool | None = None
) -> tuple[int, ...]:
    """Ids of plain text; words like <|im_end|> in it stay plain text."""
    if not text:
        raise RequestError(f"{field} is empty: a prompt must hold at least one token", field=field)
    check_bytes(field, text, limits.max_prompt_bytes)
    return tuple(tokenizer.encode(text, add_bos=add_bos))


def chat_ids(
    tokenizer: Tokenizer, messages: Sequence[Mapping], *, limits: Limits, add_generation_prompt: bool = True
) -> tuple[int, ...]:
    """Ids of a conversation through the model's own chat template; contents are plain text."""
    if len(messages) > limits.max_chat_messages:
        raise RequestError(
            f"the chat has {len(messages)} messages, this server takes {limits.max_chat_messages}", field="messages"
        )
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    check_bytes("messages", "".join(part for content in contents for part in _texts(content)), limits.max_prompt_bytes)
    return tuple(render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt))


def _texts(content: object) -> Iterator[str]:
    """A message's text, or those of its parts; what else stands there is refused where the template is rendered."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text
