"""The engine's loop around a Scheduler and the fake device, one step ahead, and the answers that it must give.

`expected` knows nothing of pages, batches or time: it runs the fake's model over one sequence in a plain loop."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from jaxserve.config import SchedulerConfig
from jaxserve.request import Chunk, FinishReason, Request, SamplingParams, TokenLogprobs, child_seed
from jaxserve.sched.plan import Cut, Plan
from jaxserve.sched.scheduler import Scheduler
from tests.fakes import FakeDevice, Pending, cell_of, draw, logprob_of

VOCAB = 40
EOS = (38, 39)

Pair = tuple[int, int]  # stands for a stop string: the text of these two tokens


def make_config(**changes) -> SchedulerConfig:
    """Small enough that everything runs out: 4 slots, pages of 4 tokens, sequences of at most 48."""
    numbers = {
        "slots": 4, "page_size": 4, "num_pages": 33, "max_len": 48, "queue_limit": 64,
        "decode_buckets": (2, 4), "prefill_buckets": ((1, 16), (2, 8), (4, 4)),
    }  # fmt: skip
    return SchedulerConfig(**{**numbers, **changes})


def make_request(name: str, prompt, *, priority: int = 0, salt: str = "", deadline=None, make_mask=None, **params):
    return Request(
        id=name,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**{"seed": 0, "detokenize": False, **params}),
        priority=priority,
        cache_salt=salt,
        deadline=deadline,
        make_mask=make_mask,
    )


def some_prompt(length: int, start: int = 0) -> tuple[int, ...]:
    """Different for every `start` from the first token on."""
    return tuple((start * 7 + i * i + 3 * i) % (VOCAB - len(EOS)) for i in range(length))


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]


def expected(request: Request, index: int, max_len: int, pair: Pair | None = None) -> Answer:
    params, prompt = request.params, request.prompt_ids
    tokens, cells, scores = list(prompt), [], [None]
    for position in range(len(prompt)):
        cells.append(cell_of(tokens[position], position, cells))
        if position + 1 < len(prompt):
            wanted = position + 1 >= params.prompt_logprobs_start
            scores.append(TokenLogprobs(tokens[position + 1], logprob_of(cells), 1) if wanted else None)
    limit = max_len if params.max_tokens is None else min(len(prompt) + params.max_tokens, max_len)
    eos = () if params.ignore_eos else EOS
    stops, logprobs = {*eos, *params.stop_token_ids}, []

    def answer(reason: FinishReason, stop_reason: int | str | None = None) -> Answer:
        return Answer(tuple(tokens[len(prompt) :]), reason, stop_reason, tuple(logprobs), tuple(scores))

    while len(tokens) < limit:
        may_stop = len(tokens) >= len(prompt) + params.min_tokens
        seed = child_seed(params.seed or 0, index)
        token = draw(seed, len(tokens), cells, VOCAB, () if may_stop else stops)
        logprobs.append(TokenLogprobs(token, logprob_of(cells), 1))
        tokens.append(token)
        if len(tokens) > len(prompt) + 1 and (tokens[-2], token) == pair:
            return answer(FinishReason.STOP, "pair")
        if token in stops and may_stop:
            return answer(FinishReason.STOP, None if token in eos else token)
        cells.append(cell_of(token, len(tokens) - 1, cells))
    return answer(FinishReason.LENGTH)


@dataclass
class Stream:
    """All that one sequence has received."""

    request: Request
    index: int
    pair: Pair | None
    may_fail: bool = False  # a NaN, or a pool that is too small, is part of the test
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]

    @property
    def is_ended(self) -> bool:
        return bool(self.chunks) and self.last.finish_reason is not None

    def receive(self, chunk: Chunk) -> None:
        assert not self.is_ended, f"{self.request.id}/{self.index} goes on after its end"
        assert (chunk.finish_reason is None) == (chunk.usage is None), "usage comes with the end and only then"
        assert chunk.token_ids or chunk.finish_reason is not None, "an empty chunk"
        if chunk.token_ids and self.request.params.logprobs is not None:
            assert len(chunk.logprobs or ()) == len(chunk.token_ids)
        self.chunks.append(chunk)


class WrongAnswer(AssertionError):
    """A sequence got other tokens than a plain run gives."""


class Loop:
    """DESIGN section 6's loop.  After every step the pool, the slots and the plan are checked."""

    def __init__(self, config: SchedulerConfig | None = None, *, seed: int = 0, scheduler=Scheduler, device=None):
        self.config = config or make_config()
        self.scheduler = scheduler(self.config, EOS)
        self.device = device or FakeDevice(self.config, vocab=VOCAB, seed=seed)
        self.random = random.Random(seed)
        self.streams: dict[tuple[str, int], Stream] = {}
        self.unread: Pending | None = None
        self.now = 0.0
        self.plans: list[Plan] = []

    def add(self, request: Request, pair: Pair | None = None) -> Request:
        self.scheduler.add(request, self.now)
        for index in range(request.params.n):
            assert (request.id, index) not in self.streams, "the harness tells streams apart by id"
            self.streams[request.id, index] = Stream(request, index, pair)
        return request

    def ask(self, name: str, prompt, **options) -> Request:
        return self.add(make_request(name, prompt, **options))

    def poison(self, stream: Stream, position: int) -> None:
        """K/V of this position will be NaN."""
        number = next(
            number
            for number, sequence in self.scheduler.roster.alive.items()
            if (sequence.request.id, sequence.index) == (stream.request.id, stream.index)
        )
        self.device.poison[number] = position
        stream.may_fail = True

    def step(self) -> Plan | None:
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        new = None
        if plan is not None:
            self._check_writes(plan)
            new = self.device.dispatch(plan)
            self.plans.append(plan)
            if self.random.random() < 0.3:  # the device may be ahead of what the host reads
                new.result()
        elif self.unread is None:
            assert not self.scheduler.has_unfinished, "the scheduler hangs: nothing planned, nothing unread"
        if self.unread is not None:
            outcome = self.unread.result()
            cuts = self._cuts(self.unread.plan, outcome)
            chunks = self.scheduler.commit(self.unread.plan, outcome, cuts, self.now)
            self.scheduler.check()
        else:
            chunks = self.scheduler.drain()
        for chunk in chunks:
            self.streams[chunk.request_id, chunk.index].receive(chunk)
        self.unread = new
        self.now += 0.01
        return plan

    def run(self, most: int = 4000) -> None:
        """Until all is done; then everything must have come back."""
        for _ in range(most):
            if not self.scheduler.has_unfinished and self.unread is None:
                break
            self.step()
        else:
            raise AssertionError(f"not done after {most} steps")
        for chunk in self.scheduler.drain():
            self.streams[chunk.request_id, chunk.index].receive(chunk)
        load = self.scheduler.load()
        assert load.running == load.waiting == load.pages_held == 0
        assert load.pages_free + load.pages_cached == load.pages_total

    def verify(self) -> None:
        """Every sequence has ended once, with the tokens of a plain run (or a prefix of them, when it was cut off)."""
        for (name, index), stream in self.streams.items():
            assert stream.is_ended, f"{name}/{index} has not ended"
            self._verify(stream)

    def _verify(self, stream: Stream) -> None:
        request, last, got = stream.request, stream.last, stream.token_ids
        answer = expected(request, stream.index, self.config.max_len, stream.pair)
        assert last.usage is not None
        assert last.usage.prompt_tokens == len(request.prompt_ids)
        assert last.usage.completion_tokens == len(got)
        if got != answer.token_ids[: len(got)]:
            raise WrongAnswer(f"{request.id}/{stream.index}: {got} is not {answer.token_ids}")
        if last.finish_reason is FinishReason.ABORT or (last.finish_reason is FinishReason.ERROR and stream.may_fail):
            return
        if (got, last.finish_reason, last.stop_reason) != (answer.token_ids, answer.reason, answer.stop_reason):
            raise WrongAnswer(f"{request.id}/{stream.index}: {last} is not {answer}")
        if request.params.logprobs is not None:
            assert tuple(entry for chunk in stream.chunks for entry in chunk.logprobs or ()) == answer.logprobs
        sent = [chunk.prompt_logprobs for chunk in stream.chunks if chunk.prompt_logprobs is not None]
        assert sent == ([answer.prompt_logprobs] if request.params.prompt_logprobs is not None else [])
        assert sent == [] or stream.chunks[0].prompt_logprobs is not None, "prompt logprobs come first"

    def _cuts(self, plan: Plan, outcome) -> dict[int, Cut]:
        """What the engine does with stop strings: it looks at the tokens that count, before they are committed."""
        cuts = {}
        for row, drawn in zip(plan.rows, outcome.rows, strict=True):
            sequence = self.scheduler.current(row)
            if sequence is None or not drawn.token_ids:
                continue
            pair = self.streams[sequence.request.id, sequence.index].pair
            tokens = drawn.token_ids[: sequence.ending(drawn.token_ids, None).keep]
            text = (*sequence.output[-1:], *tokens)
            hits = [i for i in range(1, len(text)) if text[i - 1 : i + 1] == pair]
            if hits:
                cuts[row.sequence] = Cut(keep=hits[0] + 1 - (len(text) - len(tokens)), stop_reason="pair")
        return cuts

    def _check_writes(self, plan: Plan) -> None:
        """No row writes a page that another sequence holds."""
        pool, size = self.scheduler.roster.pool, self.config.page_size
        for row in plan.rows:
            sequence = self.scheduler.roster.alive[row.sequence]
            start = row.start if row.start >= 0 else sequence.shortest - 2  # this step counts as unread already
            for page in row.pages[start // size :]:
                assert pool.holders(page) == 1, f"row {row} writes page {page}, which others hold"
