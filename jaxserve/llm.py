"""`LLM`: the engine for Python users.  Prompts in, outputs in the same order, everything batched in between."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from jaxserve.config import DEFAULT_MODEL, EngineConfig
from jaxserve.engine import Engine
from jaxserve.request import Chunk, FinishReason, Request, RequestError, SamplingParams, TokenLogprobs, Usage
from jaxserve.start import load_engine
from jaxserve.streams import RequestHandle
from jaxserve.text.chat import render_chat

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One finished sequence."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str  # stop | length | abort | error
    stop_reason: int | str | None
    usage: Usage
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One prompt's samples; the first one's fields are also the output's own."""

    prompt_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    samples: tuple[Sample, ...]
    seed: int | None

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.samples[0].stop_reason

    @property
    def usage(self) -> Usage:
        return self.samples[0].usage


class LLM:
    """A model, ready.  Every option of EngineConfig is a keyword with the name of its flag; `with` closes it.

    ValueError names the option and the numbers; RequestError the request's field."""

    def __init__(self, model: str = DEFAULT_MODEL, **options):
        self.engine: Engine = load_engine(EngineConfig(model=model, **options))
        self.engine.start()
        self._ids = itertools.count()

    @property
    def tokenizer(self):
        return self.engine.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """prompts: texts or lists of token ids, one or many; params: one for all, or one each.

        Every prompt is checked before the first one runs."""
        many = _as_many(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts and {len(each)} sampling params: give one for all, or one each")
        return self._run([self._encode(prompt) for prompt in many], each)

    def chat(
        self,
        messages: Sequence[Mapping] | Sequence[Sequence[Mapping]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping] | None = None,
    ) -> list[RequestOutput]:
        """One conversation (a list of {"role", "content"}) or many, through the checkpoint's own chat template.

        tools: shown to the model, as OpenAI writes them; `jaxserve.text.tool_calls` finds the calls in a text, which
        must show special tokens (`skip_special_tokens=False`) where the markers are some."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        many = cast(Sequence[Sequence[Mapping]], [messages] if is_one else messages)
        ids = [tuple(render_chat(self.tokenizer, conversation, tools=tools)) for conversation in many]
        return self._run(ids, [params or SamplingParams()] * len(ids))

    def close(self) -> None:
        self.engine.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return tuple(ids)

    def _run(self, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        requests = [
            self.engine.prepare(Request(id=f"llm-{next(self._ids)}", prompt_ids=ids, params=each))
            for ids, each in zip(prompts, params, strict=True)
        ]
        handles: list[RequestHandle] = []
        outputs: list[RequestOutput] = []
        try:
            for request in requests:
                while not self.engine.has_room(request.params.n) and len(outputs) < len(handles):
                    outputs.append(_collect(handles[len(outputs)]))
                handles.append(self.engine.submit(request))
            outputs += [_collect(handle) for handle in handles[len(outputs) :]]
        except BaseException:  # Ctrl-C included: nothing of this call keeps running
            for handle in handles:
                handle.abort()
            raise
        return outputs


def _as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a list of ids is one prompt."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast(list[Prompt], [prompts] if is_one else list(prompts))


def _collect(handle: RequestHandle) -> RequestOutput:
    wholes = handle.collect()
    return RequestOutput(
        prompt_ids=handle.request.prompt_ids,
        prompt_logprobs=wholes[0].prompt_logprobs,
        samples=tuple(_sample(whole) for whole in wholes),
        seed=handle.request.params.seed,
    )


def _sample(whole: Chunk) -> Sample:
    assert whole.finish_reason is not None and whole.usage is not None
    return Sample(
        index=whole.index,
        text=whole.text or "",
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        finish_reason=FinishReason(whole.finish_reason).value,
        stop_reason=whole.stop_reason,
        usage=whole.usage,
        error=whole.error,
    )
