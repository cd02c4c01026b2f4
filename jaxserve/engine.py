"""The engine: one model served to any thread.  An inbox in, streams out, a loop thread between.

Nothing here is on the device, and nothing here decides what is computed: that is the loop's (`jaxserve.loop`)."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.config import EngineConfig, SchedulerConfig, StepTime
from jaxserve.limits import check_request
from jaxserve.loop import HEARTBEAT_SECONDS, Abort, Add, End, Loop
from jaxserve.metrics import Meter, Snapshot
from jaxserve.programs import compile_counter
from jaxserve.request import Chunk, ErrorCode, Request, RequestError
from jaxserve.runner import Runner
from jaxserve.sched.counters import Counters
from jaxserve.sched.scheduler import Scheduler
from jaxserve.streams import RequestHandle, hand_over
from jaxserve.text import Tokenizer
from jaxserve.text.structured import Grammars

log = logging.getLogger("jaxserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a client may want to know before it asks."""

    name: str
    architecture: str
    vocab: int
    max_len: int
    dtype: str
    device: str
    attention_backend: str
    parameters: int
    pool_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the engine is.  Counters never fall."""

    running: int
    waiting: int
    slots: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    recomputed_tokens: int
    decode_calls: int
    verify_calls: int  # decode calls that verified drafts
    drafts: int  # proposals, one a row and verify call
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]  # entry i: how often a proposal's token i was accepted
    nan_rows: int
    steps: int
    compiles: int  # since the start; anything but 0 is a bug
    host_seconds: float  # CPU time of the loop's thread


class Engine:
    """Built by `jaxserve.start.load_engine`; then `start()`, any number of `submit()`, `stop()`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner,
        scheduler_config: SchedulerConfig,
        tokenizer: Tokenizer,
        info: ModelInfo,
    ):
        self.config = config
        self.info = info
        self.tokenizer = tokenizer
        self._runner = runner
        self._scheduler_config = scheduler_config
        self._grammars = Grammars(tokenizer, vocab=info.vocab)
        self._seeds = random.Random(config.seed)
        self._lock = threading.Lock()  # of the three below: submit and the loop both write them
        self._handles: dict[str, RequestHandle] = {}
        self._open: dict[str, int] = {}  # request -> sequences that have not ended
        self._unfinished = 0  # sequences, of all requests
        self._counters = Counters()  # these two outlive every loop: what they count never falls
        self._meter = Meter()
        self._loop = self._new_loop(host_seconds=0.0)
        self._thread: threading.Thread | None = None
        self._draining = False
        self._failure: BaseException | None = None
        # Compiles between start and stop of earlier runs, and jax's own count at this one's start; None = not running.
        self._compiles: tuple[int, int | None] = (0, None)
        self._requests = 0  # accepted since the process began

    def start(self) -> None:
        """Begin to serve; again after `stop()`."""
        assert self._thread is None, "the engine runs already"
        self._draining = False
        self._loop = self._new_loop(host_seconds=self._loop.host_seconds)
        self._compiles = (self._num_compiles, compile_counter().compiles)
        # Python's collector would walk all that stands (jax's modules, programs) again and again, a tenth of a second each
        # time, in whatever thread makes an object too many: mostly the loop's.
        gc.collect()
        gc.freeze()
        self._thread = threading.Thread(target=self._run, name="jaxserve-loop", daemon=True)
        self._thread.start()

    def stop(self, drain_timeout: float = 0.0) -> None:
        """Refuse new work, let what runs finish for `drain_timeout` seconds, abort the rest, end the loop."""
        self._draining = True
        if self._thread is None:
            return
        deadline = time.monotonic() + drain_timeout
        while self._open and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._loop.inbox.put(End())
        self._thread.join()
        self._thread = None
        gc.unfreeze()  # what was an engine may go
        self._compiles = (self._num_compiles, None)
        self._grammars.close()

    def prepare(self, request: Request) -> Request:
        """The request with its grammar and bad words compiled: milliseconds to seconds, on the caller's thread.

        RequestError as from `check`, or naming the field and the parser's reason."""
        self.check(request)
        return replace(request, make_mask=self._grammars.mask_factory(request.params) or request.make_mask)

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request.  RequestError when it cannot be served; else read its chunks from the handle.

        Who must not wait (an event loop) has it prepared elsewhere before; a request that is not is prepared here."""
        if self._failure is not None:
            raise RequestError(f"the engine has stopped: {self._failure}", code=ErrorCode.INTERNAL)
        if self._draining or self._thread is None:
            raise RequestError("the server is shutting down", code=ErrorCode.UNAVAILABLE)
        if request.make_mask is None:
            request = self.prepare(request)
        else:
            self.check(request)
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=self._seeds.getrandbits(63)))
        with self._lock:
            if request.id in self._handles:
                raise RequestError(
                    f"a request with id {request.id!r} is running", code=ErrorCode.ALREADY_EXISTS, field="id"
                )
            if not self.has_room(request.params.n):
                raise RequestError(
                    f"{self._unfinished} sequences run or wait; {self.config.slots} slots and a queue of"
                    f" {self.config.queue_limit} hold no {request.params.n} more: try again later",
                    code=ErrorCode.RESOURCE_EXHAUSTED,
                )
            handle = RequestHandle(request, self.tokenizer, self.abort)
            self._handles[request.id] = handle
            self._open[request.id] = request.params.n
            self._unfinished += request.params.n
            self._requests += 1
        self._loop.inbox.put(Add(request, time.monotonic()))
        return handle

    def check(self, request: Request) -> None:
        """RequestError when this model and these limits cannot serve the request, however idle the engine is."""
        check_request(
            request,
            vocab=self.info.vocab,
            max_len=self.info.max_len,
            eos_ids=self.tokenizer.eos_ids,
            config=self.config,
        )

    def has_room(self, sequences: int) -> bool:
        """Whether the slots and the queue hold that many more."""
        return self._unfinished + sequences <= self.config.slots + self.config.queue_limit

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands.  False when no such request runs."""
        if request_id not in self._handles:
            return False
        self._loop.inbox.put(Abort(request_id))
        return True

    @property
    def step_times(self) -> tuple[StepTime, ...]:
        """Of the decode and verify programs, as measured at the start; empty without adaptive speculation."""
        return self._scheduler_config.step_times

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if it died."""
        return self._failure

    @property
    def beat(self) -> float:
        """When the loop last went round: time.monotonic seconds.  Idle or busy, it does so every second or sooner."""
        return self._loop.beat

    @property
    def is_healthy(self) -> bool:
        """The loop lives and went round within the last 30 heartbeats (a hung device shows)."""
        is_alive = self._thread is not None and self._thread.is_alive() and self._failure is None
        return is_alive and time.monotonic() - self._loop.beat < 30 * HEARTBEAT_SECONDS

    def load(self) -> Load:
        """A snapshot; each number is right, together they may be a step apart."""
        load = self._loop.scheduler.load()
        totals = load.totals
        return Load(
            running=load.running,
            waiting=load.waiting + self._loop.inbox.qsize(),
            slots=load.slots,
            pages_total=load.pages_total,
            pages_free=load.pages_free,
            pages_cached=load.pages_cached,
            pages_held=load.pages_held,
            requests=self._requests,
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.output_tokens,
            prefix_hit_tokens=totals.prefix_hit_tokens,
            preemptions=totals.preemptions,
            recomputed_tokens=totals.recomputed_tokens,
            decode_calls=totals.decode_calls,
            verify_calls=totals.verify_calls,
            drafts=totals.drafts,
            draft_tokens=totals.drafted_tokens,
            accepted_tokens=totals.accepted_tokens,
            accepted_per_position=totals.accepted_per_position,
            nan_rows=totals.nan_rows,
            steps=totals.steps,
            compiles=self._num_compiles,
            host_seconds=self._loop.host_seconds,
        )

    def metrics(self) -> Snapshot:
        """Everything the engine measures; for any thread, at any time."""
        load = self._loop.scheduler.load()
        return Snapshot(
            load=replace(load, waiting=load.waiting + self._loop.inbox.qsize()),
            page_size=self._scheduler_config.page_size,
            requests=self._requests,
            compiles=self._num_compiles,
            loop_cpu_seconds=self._loop.host_seconds,
            distributions=self._meter.read(),
        )

    @property
    def _num_compiles(self) -> int:
        """Between a start and a stop."""
        before, began = self._compiles
        return before + (0 if began is None else compile_counter().compiles - began)

    def _new_loop(self, *, host_seconds: float) -> Loop:
        scheduler = Scheduler(self._scheduler_config, self.tokenizer.eos_ids, self._counters)
        return Loop(
            runner=self._runner,
            scheduler=scheduler,
            tokenizer=self.tokenizer,
            meter=self._meter,
            host_seconds=host_seconds,
            deliver=self._deliver,
        )

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # the loop's thread has nobody above it
            self._failure = error
            log.exception("the engine's loop died; every stream ends with an error")
            self._loop.fail(f"the engine has stopped: {error}")

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        handles = self._handles  # a handle is taken out by this thread alone
        deliveries = [(handles[chunk.request_id], chunk) for chunk in chunks]
        ended = [chunk.request_id for chunk in chunks if chunk.finish_reason is not None]
        if ended:
            with self._lock:
                self._unfinished -= len(ended)
                for request_id in ended:
                    self._open[request_id] -= 1
                    if not self._open[request_id]:
                        del self._handles[request_id], self._open[request_id]
        hand_over(deliveries)
