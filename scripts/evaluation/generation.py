"""A task's `generation_kwargs` as SamplingParams.  What has no meaning here is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from jaxserve.request import RequestError, SamplingParams

DEFAULT_MAX_TOKENS = 256  # as the harness's own model classes have it

# Set by the harness in other words (max_gen_toks, until, do_sample), or by the scoring of prompts.
_NOT_A_TASKS = {"max_tokens", "stop", "n", "logprobs", "prompt_logprobs", "prompt_logprobs_start", "detokenize"}
NAMES = tuple(sorted({field.name for field in dataclasses.fields(SamplingParams)} - _NOT_A_TASKS))


def sampling_params(kwargs: Mapping, *, eos: str, special_tokens: Mapping[str, int]) -> SamplingParams:
    """Greedy unless the task samples (`do_sample` or a temperature above 0).  Raises RequestError naming the argument.

    A stop that is a control token's text stops at the token, for control tokens add nothing to the text."""
    known = normalize_gen_kwargs(dict(kwargs), DEFAULT_MAX_TOKENS)
    rest: dict = dict(known)
    stops = [text for text in handle_stop_sequences(rest.pop("until"), eos) if text]  # an empty one stops nothing
    max_tokens = rest.pop("max_gen_toks")
    if rest.pop("num_beams", 1) != 1:
        raise RequestError(f"num_beams={kwargs['num_beams']}: there is no beam search here", field="num_beams")
    if not rest.pop("do_sample"):
        rest["temperature"] = 0.0
    _refuse_unknown(rest, NAMES)
    stop_ids = [*rest.pop("stop_token_ids", ()), *(special_tokens[text] for text in stops if text in special_tokens)]
    return SamplingParams(max_tokens=max_tokens, stop=stops, stop_token_ids=stop_ids, **rest)


def _refuse_unknown(kwargs: Mapping, names: Sequence[str]) -> None:
    for name, value in kwargs.items():
        if name not in names:
            raise RequestError(
                f"generation_kwargs hold {name}={value!r}, which jaxserve does not know; it takes until, max_gen_toks,"
                f" do_sample, {', '.join(names)}",
                field=name,
            )
