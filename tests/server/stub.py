"""A stand-in for the engine: real handles, real checks, a loop thread of its own, canned tokens.  No jax.

Every sequence gets the bytes of `answer`, then end-of-sequence; one token each per step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.limits import check_request
from jaxserve.metrics import Meter, Snapshot
from jaxserve.request import Chunk, ErrorCode, FinishReason, Request, RequestError, TokenLogprobs, Usage
from jaxserve.sched.counters import Counters, SchedulerLoad
from jaxserve.streams import RequestHandle, hand_over
from jaxserve.text.detokenize import Detokenizer

IM_START, IM_END, BOS = 256, 257, 258
VOCAB = 300
PAGES = 64
ANSWER = " Paris, naïve 🫠. The end."


class StubTokenizer:
    """Bytes as tokens."""

    vocab_size = VOCAB
    bos_id = BOS
    eos_ids = (IM_END,)
    special_ids = frozenset({IM_START, IM_END, BOS})
    special_tokens: Mapping[str, int] = {"<|im_start|>": IM_START, "<|im_end|>": IM_END, "<s>": BOS}
    adds_bos = False
    strips_leading_space = False
    tool_template: str | None = None
    chat_template: str | None = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def __init__(self, *, seconds: float = 0.0):
        self.seconds = seconds  # that encoding takes
        self.threads: set[str] = set()
        self._special_names = {token_id: name for name, token_id in self.special_tokens.items()}

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        assert not parse_special
        self.threads.add(threading.current_thread().name)
        time.sleep(self.seconds)
        return ([BOS] if add_bos else []) + list(text.encode())

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        return [i for part in parts for i in ([part] if isinstance(part, int) else self.encode(part))]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        kept = [i for i in ids if not (skip_special and i in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self._special_names.get(token_id, "").encode()

    def save(self, folder: Path) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class StubInfo:
    name: str = "stub"
    architecture: str = "Stub"
    vocab: int = VOCAB
    max_len: int = 512
    dtype: str = "float32"
    device: str = "none"
    attention_backend: str = "none"
    parameters: int = 7
    pool_tokens: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StubLoad:
    running: int
    waiting: int = 0
    slots: int = 32
    pages_total: int = PAGES


@dataclass
class Sequence_:
    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    decoder: Detokenizer | None = None


class StubEngine:
    """What `server.backend.Backend` asks for.  `hold()` lets nothing be drawn until `release()`."""

    def __init__(
        self,
        *,
        answer: str | Sequence[int] = ANSWER,
        step_seconds: float = 0.0002,
        max_len: int = 512,
        queue_limit: int = 64,
        slots: int = 32,
        tokenizer: StubTokenizer | None = None,
        per_step: int = 1,
        is_paced: bool = False,
        is_stamped: bool = False,
    ):
        self.config = EngineConfig(queue_limit=queue_limit, slots=slots)
        self.tokenizer = tokenizer or StubTokenizer()
        self.info = StubInfo(max_len=max_len)
        self.requests: list[Request] = []  # every one that was accepted
        self.aborted: list[str] = []
        self._counters = Counters()
        self._meter = Meter()
        self._answer = [*(answer.encode() if isinstance(answer, str) else answer), IM_END]
        self._step_seconds = step_seconds
        self._per_step = per_step
        self._is_stamped = is_stamped  # every chunk's text is its time.monotonic_ns()
        self._is_paced = is_paced  # a step waits until every chunk of the one before has been taken: none are merged
        self._changed = threading.Condition()
        self._handles: dict[str, RequestHandle] = {}
        self._sequences: list[Sequence_] = []
        self._aborts: set[str] = set()
        self._is_held = False
        self._is_ending = False
        self._draining = False
        self._failure: BaseException | None = None
        self._poison: BaseException | None = None
        self._is_hung = False
        self._thread: threading.Thread | None = None

    # -- the engine's own interface ------------------------------------------------------------------------------

    def start(self) -> None:
        self._draining = self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="stub-loop", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> RequestHandle:
        if self._failure is not None:
            raise RequestError(f"the engine has stopped: {self._failure}", code=ErrorCode.INTERNAL)
        if self._draining:
            raise RequestError("the server is shutting down", code=ErrorCode.UNAVAILABLE)
        self.check(request)
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=12345))
        with self._changed:
            if request.id in self._handles:
                message = f"a request with id {request.id!r} is running"
                raise RequestError(message, code=ErrorCode.ALREADY_EXISTS, field="id")
            if len(self._sequences) + request.params.n > self.config.queue_limit:
                raise RequestError("the queue is full: try again later", code=ErrorCode.RESOURCE_EXHAUSTED)
            handle = RequestHandle(request, self.tokenizer, self.abort)
            self._handles[request.id] = handle
            for index in range(request.params.n):
                stop = request.params.stop
                decoder = Detokenizer(self.tokenizer, stop=stop, shown_ids=request.shown_ids) if stop else None
                self._sequences.append(Sequence_(request, index, decoder=decoder))
            self.requests.append(request)
            self._meter.arrived(request, time.monotonic())
            self._counters.sequences += request.params.n
            self._counters.prompt_tokens += len(request.prompt_ids) * request.params.n
            self._changed.notify_all()
        return handle

    def prepare(self, request: Request) -> Request:
        self.check(request)
        return request

    def check(self, request: Request) -> None:
        check_request(
            request, vocab=VOCAB, max_len=self.info.max_len, eos_ids=self.tokenizer.eos_ids, config=self.config
        )

    def has_room(self, sequences: int) -> bool:
        return len(self._sequences) + sequences <= self.config.queue_limit

    def abort(self, request_id: str) -> bool:
        with self._changed:
            if request_id not in self._handles:
                return False
            self._aborts.add(request_id)
            self._changed.notify_all()
        return True

    def stop(self, drain_timeout: float = 0.0) -> None:
        self._draining = True
        end = time.monotonic() + drain_timeout
        while self._handles and time.monotonic() < end:
            time.sleep(0.005)
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def load(self) -> StubLoad:
        return StubLoad(running=self.running)

    def metrics(self) -> Snapshot:
        load = SchedulerLoad(
            running=self.running, waiting=0, slots=self.config.slots, pages_total=PAGES, pages_free=PAGES - self.running,
            pages_cached=0, pages_held=self.running, totals=self._counters.copy(),
        )  # fmt: skip
        return Snapshot(
            load=load, page_size=64, requests=len(self.requests), compiles=0, loop_cpu_seconds=0.0,
            distributions=self._meter.read(),
        )  # fmt: skip

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_healthy(self) -> bool:
        return self._failure is None and not self._is_hung

    @property
    def beat(self) -> float:
        return 0.0 if self._is_hung else time.monotonic()

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    # -- for the tests -------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._sequences)

    def hold(self) -> None:
        self._is_held = True

    def release(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def hang(self, hung: bool) -> None:
        self._is_hung = hung

    def die(self) -> None:
        with self._changed:
            self._poison = RuntimeError("poisoned")
            self._changed.notify_all()

    # -- the loop's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._step()
            self._deliver([self._end(s, FinishReason.ABORT) for s in list(self._sequences)])
        except RuntimeError as error:
            self._failure = error
            self._deliver([self._end(s, FinishReason.ERROR, error=str(error)) for s in list(self._sequences)])

    def _step(self) -> None:
        with self._changed:
            if not self._sequences or self._is_held:
                self._changed.wait(0.01)
            if self._poison is not None:
                raise self._poison
            aborts, self._aborts = self._aborts, set()
            now = time.monotonic()
            chunks = []
            for sequence in list(self._sequences):
                deadline = sequence.request.deadline
                if sequence.request.id in aborts or (deadline is not None and now >= deadline):
                    self.aborted.append(sequence.request.id)
                    chunks.append(self._end(sequence, FinishReason.ABORT))
                elif not self._is_held:
                    chunks.append(self._draw(sequence))
        self._deliver(chunks)
        if self._is_paced:
            self._wait_for_readers()
        if self._step_seconds:
            time.sleep(self._step_seconds)

    def _wait_for_readers(self) -> None:
        for handle in list(self._handles.values()):
            assert handle.loop is not None
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), handle.loop).result()  # what was handed over is there
            while handle._waiting:
                time.sleep(0.0002)

    def _draw(self, sequence: Sequence_) -> Chunk:
        params = sequence.request.params
        answer = self._answer[:-1] if params.ignore_eos else self._answer
        limit = self.info.max_len - len(sequence.request.prompt_ids)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        first = not sequence.tokens
        self._meter.admitted(sequence.request.id, sequence.index, time.monotonic())
        new: list[int] = []
        text, reason, stop_reason = None, None, None
        for _ in range(self._per_step):
            if len(sequence.tokens) >= limit:
                reason = FinishReason.LENGTH
                break
            token = answer[len(sequence.tokens) % len(answer)]
            sequence.tokens.append(token)
            new.append(token)
            if token == IM_END or token in params.stop_token_ids:
                reason = FinishReason.STOP
                stop_reason = token if token in params.stop_token_ids else None
                break
            if len(sequence.tokens) >= limit:
                reason = FinishReason.LENGTH
        if sequence.decoder is not None:
            piece = sequence.decoder.feed(new)
            text = piece.text
            if piece.cut is not None:
                reason, stop_reason = FinishReason.STOP, piece.cut.stop
            elif reason is not None:
                text += sequence.decoder.flush()
        if self._is_stamped:
            text = f"{time.monotonic_ns()} "
        self._counters.output_tokens += len(new)
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(_entry(token, params.logprobs) for token in new)
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            ids = sequence.request.prompt_ids
            prompt_logprobs = (None, *(_entry(token, params.prompt_logprobs) for token in ids[1:]))
        chunk = Chunk(
            request_id=sequence.request.id,
            index=sequence.index,
            token_ids=tuple(new),
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return chunk if reason is None else self._end(sequence, reason, chunk=chunk, stop_reason=stop_reason)

    def _end(
        self,
        sequence: Sequence_,
        reason: FinishReason,
        *,
        chunk: Chunk | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> Chunk:
        self._sequences.remove(sequence)
        self._counters.count_ending(reason)
        usage = Usage(
            prompt_tokens=len(sequence.request.prompt_ids),
            completion_tokens=len(sequence.tokens),
            cached_tokens=3,
            drafted_tokens=2,
            accepted_tokens=1,
        )
        chunk = chunk or Chunk(request_id=sequence.request.id, index=sequence.index)
        seed = sequence.request.params.seed
        return replace(chunk, finish_reason=reason, stop_reason=stop_reason, usage=usage, error=error, seed=seed)

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        self._meter.told(chunks, time.monotonic())
        deliveries = [(self._handles[chunk.request_id], chunk) for chunk in chunks]
        open_ids = {sequence.request.id for sequence in self._sequences}
        for chunk in chunks:
            if chunk.request_id not in open_ids:
                self._handles.pop(chunk.request_id, None)
        hand_over(deliveries)


def _entry(token: int, count: int) -> TokenLogprobs:
    top = tuple((rank, -float(rank)) for rank in range(1, count + 1))
    return TokenLogprobs(token_id=token, logprob=-0.5, rank=1, top=top)
