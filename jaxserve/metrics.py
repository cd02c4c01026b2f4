"""What the engine measures of itself: histograms with fixed buckets, and a snapshot that any thread may take.

Written by the loop's thread alone, so nothing here locks; a reader sees every number of some moment, two of them at
most one step apart.  Nothing ever falls.  Names and exposition are the server's (`server.metrics`)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxserve.request import Chunk, FinishReason, Request, Times
from jaxserve.sched.counters import SchedulerLoad

# Upper bounds, inclusive.  Seconds: as vLLM's for times of requests, finer at the short end for times of steps.
STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    40.0,
)
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Histogram:
    """Counts of values by fixed buckets: bucket i holds values above bounds[i-1], up to and with bounds[i]; one more
    bucket holds the rest."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def read(self) -> HistogramReading:
        return HistogramReading(self.bounds, tuple(self.counts), self.sum)


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """A copy of a histogram's numbers."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # per bucket, not cumulative; one more than bounds
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Distributions:
    """Everything that is counted in buckets; seconds unless it says tokens.  One value a sequence where nothing else
    is said, and only of sequences that ended by `stop` or `length`."""

    queue: HistogramReading  # from arrival to a slot, of all that got one
    time_to_first_token: HistogramReading  # from arrival, of all that drew one
    inter_token_latency: HistogramReading  # between two steps that added tokens to a sequence
    time_per_output_token: HistogramReading  # mean of a sequence, the first token left out
    end_to_end: HistogramReading
    prompt_tokens: HistogramReading
    output_tokens: HistogramReading
    step_host: HistogramReading  # a loop's round, without its wait for the device
    step_wait: HistogramReading  # its wait for the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that the engine tells of itself at one moment."""

    load: SchedulerLoad
    page_size: int
    requests: int  # accepted since the process began
    compiles: int  # after a start; anything but 0 is a bug
    loop_cpu_seconds: float
    distributions: Distributions


@dataclass(slots=True)
class _Life:
    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0


@dataclass(slots=True)
class Meter:
    """Told by the loop what happens, and when.  Costs about 5 microseconds a step of 32 rows."""

    queue: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_SECONDS))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_SECONDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    step_host: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    step_wait: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    _lives: dict[str, list[_Life]] = field(default_factory=dict)  # request -> its sequences, by index
    _open: dict[str, int] = field(default_factory=dict)  # request -> sequences that have not ended

    def arrived(self, request: Request, at: float) -> None:
        self._lives[request.id] = [_Life(at) for _ in range(request.params.n)]
        self._open[request.id] = request.params.n

    def admitted(self, request_id: str, index: int, now: float) -> None:
        """It got a slot; after a preemption once more, which is no queueing."""
        life = self._lives[request_id][index]
        if life.admitted is None:
            life.admitted = now
            self.queue.observe(now - life.arrived)

    def told(self, chunks: Iterable[Chunk], now: float) -> None:
        """A step's chunks, one a sequence at the most.  The last ones get their times."""
        gaps: list[float] = []
        for chunk in chunks:
            life = self._lives[chunk.request_id][chunk.index]
            if chunk.token_ids:
                if life.first_token is None:
                    life.first_token = now
                    self.time_to_first_token.observe(now - life.arrived)
                else:
                    gaps.append(now - life.last_token)
                life.last_token = now
            if chunk.finish_reason is not None:
                self._ended(chunk, life, now)
        for gap, times in Counter(gaps).items():  # most rows were last told at the same moment
            self.inter_token_latency.observe(gap, times)

    def stepped(self, *, host: float, wait: float) -> None:
        """The loop went round with something to do: seconds on the host, and seconds waiting for the device."""
        self.step_host.observe(host)
        self.step_wait.observe(wait)

    def read(self) -> Distributions:
        """Of any thread."""
        return Distributions(
            queue=self.queue.read(),
            time_to_first_token=self.time_to_first_token.read(),
            inter_token_latency=self.inter_token_latency.read(),
            time_per_output_token=self.time_per_output_token.read(),
            end_to_end=self.end_to_end.read(),
            prompt_tokens=self.prompt_tokens.read(),
            output_tokens=self.output_tokens.read(),
            step_host=self.step_host.read(),
            step_wait=self.step_wait.read(),
        )

    def _ended(self, chunk: Chunk, life: _Life, now: float) -> None:
        self._open[chunk.request_id] -= 1
        if not self._open[chunk.request_id]:
            del self._lives[chunk.request_id], self._open[chunk.request_id]
        assert chunk.usage is not None, "a last chunk without its usage"
        if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            tokens = chunk.usage.completion_tokens
            self.end_to_end.observe(now - life.arrived)
            self.prompt_tokens.observe(chunk.usage.prompt_tokens)
            self.output_tokens.observe(tokens)
            if tokens > 1 and life.first_token is not None:
                self.time_per_output_token.observe((life.last_token - life.first_token) / (tokens - 1))
        chunk.times = Times(arrived=life.arrived, admitted=life.admitted, first_token=life.first_token, ended=now)
