"""What a request may ask of this model and these limits; everything else was checked when its values were made.

Raises RequestError naming the field and the numbers, before anything reaches the device."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.config import EngineConfig
from jaxserve.request import Request, RequestError


def check_request(
    request: Request, *, vocab: int, max_len: int, eos_ids: tuple[int, ...], config: EngineConfig
) -> None:
    """Ids in [0, vocab), prompt shorter than max_len, widths within the config's limits."""
    params = request.params
    prompt_len = len(request.prompt_ids)
    if not prompt_len:
        raise RequestError("the prompt is empty: it must hold at least one token", field="prompt")
    if prompt_len >= max_len:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, the context holds {max_len} (prompt and output together)",
            field="prompt",
        )
    if params.min_tokens > max_len - prompt_len:
        raise RequestError(
            f"min_tokens={params.min_tokens} does not fit: the prompt has {prompt_len} tokens, the context holds {max_len}",
            field="min_tokens",
        )
    if params.prompt_logprobs is not None and params.prompt_logprobs_start >= prompt_len:
        raise RequestError(
            f"prompt_logprobs_start={params.prompt_logprobs_start} is past the prompt's {prompt_len} tokens",
            field="prompt_logprobs_start",
        )
    _check_ids("prompt", request.prompt_ids, vocab)
    _check_ids("logit_bias", params.logit_bias, vocab)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab)
    _check_ids("banned_token_ids", params.banned_token_ids, vocab)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab)
    stops = set(params.stop_token_ids) | set(eos_ids if params.ends_at_eos else ())
    if params.allowed_token_ids is not None:
        never = set(params.banned_token_ids) | (stops if params.min_tokens else set())
        if set(params.allowed_token_ids) <= never:
            raise RequestError(
                "every one of allowed_token_ids is banned, or is a stop id that min_tokens holds back: no token could be drawn",
                field="allowed_token_ids",
            )
    _check_width("stop_token_ids", "max_stop_ids", len(stops), config.max_stop_ids)
    biases = set(params.logit_bias) | set(params.banned_token_ids)
    _check_width("logit_bias", "max_logit_bias", len(biases), config.max_logit_bias)
    _check_width("allowed_token_ids", "max_allowed_ids", len(params.allowed_token_ids or ()), config.max_allowed_ids)


def _check_ids(field: str, ids: Iterable[int], vocab: int) -> None:
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab:
            raise RequestError(f"{field} holds {token_id!r}: token ids are integers from 0 to {vocab - 1}", field=field)


def _check_width(field: str, limit_name: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(
            f"{field} has {count} entries, this engine takes {limit} (its flag {limit_name})", field=field
        )
