"""The stated limits of the fronts: what is refused, by name and with the numbers, before any work is spent on it.

The engine checks what depends on the model; here stands what protects the event loop and the memory from a message
that is merely large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass

from jaxserve.request import MAX_LOGPROBS, MAX_SAMPLES, RequestError
from server.args import MIB, ServerConfig
from server.backend import Backend

MAX_ID_BYTES = 256
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_BYTES = 1024
MAX_CHAT_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_TIMEOUT = 86_400  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Told by ModelInfo under the same names."""

    max_len: int
    max_message_bytes: int
    max_prompt_bytes: int
    max_stop_ids: int
    max_logit_bias: int
    max_allowed_ids: int
    max_open_calls: int  # generate calls, whether they run, wait or are being encoded
    max_id_bytes: int = MAX_ID_BYTES
    max_samples: int = MAX_SAMPLES
    max_logprobs: int = MAX_LOGPROBS
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_string_bytes: int = MAX_STOP_STRING_BYTES
    max_chat_messages: int = MAX_CHAT_MESSAGES

    @staticmethod
    def of(config: ServerConfig, backend: Backend) -> Limits:
        return Limits(
            max_len=backend.info.max_len,
            max_message_bytes=config.max_message_mb * MIB,
            max_prompt_bytes=config.max_prompt_mb * MIB,
            max_stop_ids=backend.config.max_stop_ids,
            max_logit_bias=backend.config.max_logit_bias,
            max_allowed_ids=backend.config.max_allowed_ids,
            max_open_calls=backend.config.slots + backend.config.queue_limit,
        )

    def check_lists(self, params: Mapping[str, object]) -> None:
        """Refuses lists that are too long before anything walks them.  params: SamplingParams' fields, `stop` a list."""
        widths = {
            "stop": self.max_stop_strings,
            "stop_token_ids": self.max_stop_ids,
            "logit_bias": self.max_logit_bias,
            "banned_token_ids": self.max_logit_bias,
            "allowed_token_ids": self.max_allowed_ids,
        }
        for name, width in widths.items():
            value = params.get(name)
            if isinstance(value, Sized) and len(value) > width:
                raise RequestError(f"{name} has {len(value)} entries, this server takes {width}", field=name)
        stops = params.get("stop")
        if isinstance(stops, Sequence):
            for text in stops:
                check_bytes("stop", text, self.max_stop_string_bytes)

    def check_prompt_len(self, field: str, count: int) -> None:
        """The engine says the same of every prompt; this one comes before a long list is copied."""
        if count >= self.max_len:
            context = f"the context holds {self.max_len} (prompt and output together)"
            raise RequestError(f"{field} has {count} tokens, {context}", field=field)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Of the HTTP front alone; told by /v1/models beside the others."""

    max_body_bytes: int
    max_prompts: int = MAX_PROMPTS  # of one call; with n samples each they must fit the slots and the queue
    max_timeout: int = MAX_TIMEOUT
    max_request_id_bytes: int = MAX_ID_BYTES  # of x-request-id

    @staticmethod
    def of(config: ServerConfig) -> HttpLimits:
        return HttpLimits(max_body_bytes=config.max_message_mb * MIB)


def check_bytes(field: str, text: str, limit: int) -> None:
    size = len(text.encode("utf-8", errors="replace"))
    if size > limit:
        raise RequestError(f"{field} has {size} bytes, this server takes {limit}", field=field)
