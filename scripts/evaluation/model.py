"""The engine as a model of lm-evaluation-harness, under the name `jaxserve`.

Texts become ids, and texts are cut, as by the harness's own class for Hugging Face models; the requests of a call are
all in the engine at once.  Needs neither torch nor transformers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxserve.config import EngineConfig
from jaxserve.request import Chunk, Request, RequestError, SamplingParams
from jaxserve.start import load_engine
from jaxserve.text.chat import render_text
from server.backend import Backend

from .answers import answer_all
from .generation import sampling_params

log = logging.getLogger("jaxserve")


class JaxserveLM(TemplateLM):
    """Over a started engine, or one of its own: `JaxserveLM(model="gemma3-270m", slots=16)`, options of EngineConfig.

    `add_bos`: whether texts begin with BOS; None = as the model's own tokenizer does.
    RequestError for what the engine cannot answer."""

    def __init__(self, engine: Backend | None = None, *, add_bos: bool | None = None, **options):
        super().__init__()
        if engine is None:
            engine = load_engine(EngineConfig(**options))
            engine.start()
        self._engine: Backend = engine
        self._tokenizer = engine.tokenizer
        self._add_bos = add_bos
        self._ids = itertools.count()
        self.num_truncated = 0  # texts that lost tokens on the left, because the context holds no more

    @property
    def max_length(self) -> int:
        """Tokens of the context.  One of them stays free: a scored text has at most max_length - 1."""
        return self._engine.info.max_len

    @property
    def eot_token_id(self) -> int:
        if not self._tokenizer.eos_ids:
            raise ValueError("this model's vocabulary names no end-of-sequence token")
        return self._tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text is conditioned on."""
        bos = self._tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._engine.info.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt's text.  Without a generation prompt it ends with the last message's own text, to be gone on with.
        A template that takes no system message gets the conversation without it, as in the harness."""
        try:
            text = render_text(self._tokenizer, chat_history, add_generation_prompt=add_generation_prompt)
        except RequestError:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            log.warning("the chat template refuses the conversation with its system message: rendered without it")
            return self.apply_chat_template(rest, add_generation_prompt)
        return text if add_generation_prompt else _up_to(text, chat_history[-1]["content"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Words of control tokens become them: the harness hands a rendered chat over as text."""
        add_bos = False if add_special_tokens is False else self._add_bos
        return self._tokenizer.encode(string, add_bos=add_bos, parse_special=True)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_
    ) -> list[tuple[float, bool]]:
        """(key, context ids, continuation ids) -> (sum of the continuation's logprobs, is each the most likely one)."""
        scored = [self._scored(context, continuation) for _, context, continuation in requests]
        results = [_sum(*pair) for pair in zip(scored, self._answer("loglikelihood", scored), strict=True)]
        for (key, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Every token of a text once, each window of it with as much context as there is room for."""
        owners: list[int] = []
        scored: list[Request] = []
        for index, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 2,  # a window scores this many at most, behind one token of context
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                owners.append(index)
                scored.append(self._scored(context, continuation))
        totals = [0.0] * len(requests)
        answers = self._answer("loglikelihood_rolling", scored)
        for owner, request, answer in zip(owners, scored, answers, strict=True):
            totals[owner] += _sum(request, answer)[0]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        eos = self._tokenizer.decode([self.eot_token_id], skip_special=False)
        asked = []
        for request in requests:
            context, kwargs, *_ = request.arguments
            params = sampling_params(kwargs, eos=eos, special_tokens=self._tokenizer.special_tokens)
            asked.append(self._request(self._fitting(self.tok_encode(context), params.max_tokens or 0), params))
        texts = [answer.text or "" for answer in self._answer("generate_until", asked)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _scored(self, context: list[int], continuation: list[int]) -> Request:
        """Scores the continuation alone, so that pages of the context may be prefix hits."""
        context = context or [self.prefix_token_id]  # a context of white space, which went to the continuation
        room = self.max_length - 1
        if not 0 < len(continuation) < room:
            raise RequestError(
                f"a text to score has {len(continuation)} tokens of its own; it must have 1 to {room - 1} (the context"
                f" holds {self.max_length})"
            )
        context = self._cut(context, room - len(continuation))
        params = SamplingParams(
            max_tokens=0, temperature=0, prompt_logprobs=0, prompt_logprobs_start=len(context), detokenize=False
        )
        return self._request([*context, *continuation], params)

    def _fitting(self, prompt: list[int], max_tokens: int) -> list[int]:
        room = self.max_length - max_tokens
        if room < 1:
            raise RequestError(
                f"max_gen_toks={max_tokens} leaves no room for a prompt in a context of {self.max_length} tokens: raise"
                " --max-len, or lower it with --gen-kwargs"
            )
        return self._cut(prompt, min(room, self.max_length - 1))

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """The last `room` ids."""
        self.num_truncated += len(ids) > room
        return ids[max(len(ids) - room, 0) :]

    def _request(self, ids: Sequence[int], params: SamplingParams) -> Request:
        return Request(id=f"eval-{next(self._ids)}", prompt_ids=tuple(ids), params=params)

    def _answer(self, what: str, requests: Sequence[Request]) -> list[Chunk]:
        with _progress() as progress:
            bar = progress.add_task(what, total=len(requests))
            return answer_all(self._engine, requests, lambda: progress.advance(bar))


register_model("jaxserve")(JaxserveLM)


def _sum(request: Request, answer: Chunk) -> tuple[float, bool]:
    assert answer.prompt_logprobs is not None, "a scored request brings its logprobs"
    own = answer.prompt_logprobs[request.params.prompt_logprobs_start :]
    entries = [entry for entry in own if entry is not None]
    assert len(entries) == len(own), "every token of a continuation has its logprob"
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


def _up_to(text: str, last: str) -> str:
    """A rendered chat cut behind the text of its last message (templates may trim what stands around it)."""
    place = text.rfind(last.strip())
    if place < 0:
        raise RequestError("the chat template does not keep the last message's text, which is to be gone on with")
    kept = last.lstrip() if text.startswith(last.lstrip(), place) else last.strip()
    return text[: place + len(kept)]


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
