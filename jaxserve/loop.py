"""The loop: `schedule`, `dispatch`, `commit`, one step ahead of what has been read.

Runs in one thread and owns the scheduler and the runner there.  Knows no sockets and no event loops: commands come in
through the inbox, chunks leave through `deliver`."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.late import LateMasks, StopStrings
from jaxserve.metrics import Meter
from jaxserve.request import Chunk, FinishReason, Request, RequestError
from jaxserve.runner import Pending, Runner
from jaxserve.sched.plan import Plan
from jaxserve.sched.scheduler import Scheduler
from jaxserve.text import Tokenizer

HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Add:
    request: Request
    arrived: float  # time.monotonic seconds


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class End:
    """Abort whatever is left and leave the loop."""


class Loop:
    """`run` until End.  `deliver(chunks)` is called at most once a step."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        meter: Meter,
        host_seconds: float = 0.0,
        deliver: Callable[[Sequence[Chunk]], None],
    ):
        self.inbox: queue.SimpleQueue[Add | Abort | End] = queue.SimpleQueue()
        self.scheduler = scheduler
        self.beat = time.monotonic()
        self.host_seconds = host_seconds  # CPU time of this thread, and of the loops before it
        self._host_seconds_before = host_seconds
        self._runner = runner
        self._meter = meter
        self._deliver = deliver
        self._stop_strings = StopStrings(tokenizer)
        self._masks = LateMasks(runner.catalogue.mask_words)
        self._waited = 0.0  # seconds of this round that went by waiting for the device
        self._ended = False

    def run(self) -> None:
        unread: Pending | None = None
        while not self._ended:
            self._read_inbox(wait=unread is None and not self.scheduler.has_unfinished)
            unread = self.step(unread)

    def step(self, unread: Pending | None) -> Pending | None:
        """Dispatch the next plan, then read the one before it.  -> the plan that is now unread."""
        now = time.monotonic()
        self._waited = 0.0
        plan = self.scheduler.schedule(now)
        pending = self._runner.dispatch(plan) if plan else None
        if plan and plan.loads:
            self._meet(plan, now)
        chunks = self._commit(unread) if unread else self.scheduler.drain()
        if pending and pending.plan.is_masked:
            drafts = self._runner.drafts(pending)
            self._runner.sample(pending, self._masks.words(pending.plan, self.scheduler, drafts))
            chunks += self.scheduler.drain()  # of sequences that have no mask any more
        if chunks:
            self._tell(chunks)
        if pending or unread:
            self._meter.stepped(host=time.monotonic() - now - self._waited, wait=self._waited)
        self.beat = now
        self.host_seconds = self._host_seconds_before + time.thread_time()
        return pending

    def fail(self, error: str) -> None:
        """The loop died: every stream ends with an error."""
        self._tell(self.scheduler.fail_all(error))

    def _tell(self, chunks: Sequence[Chunk]) -> None:
        self._stop_strings.finish(chunks)
        self._meter.told(chunks, time.monotonic())
        self._deliver(chunks)

    def _meet(self, plan: Plan, now: float) -> None:
        """Tells the meter who got a slot."""
        slots = {load.slot for load in plan.loads}
        for row in plan.rows:
            if row.slot in slots and (sequence := self.scheduler.current(row)) is not None:
                self._meter.admitted(sequence.request.id, sequence.index, now)

    def _commit(self, unread: Pending) -> list[Chunk]:
        began = time.monotonic()
        outcome = unread.result()
        self._waited = time.monotonic() - began
        cuts, texts = self._stop_strings.search(unread.plan, outcome, self.scheduler)
        chunks = self.scheduler.commit(unread.plan, outcome, cuts, time.monotonic(), texts)
        self._masks.forget_ended(self.scheduler)
        return chunks

    def _read_inbox(self, *, wait: bool) -> None:
        try:
            command = self.inbox.get(timeout=HEARTBEAT_SECONDS) if wait else self.inbox.get_nowait()
            while True:
                self._obey(command)
                command = self.inbox.get_nowait()
        except queue.Empty:
            return

    def _obey(self, command: Add | Abort | End) -> None:
        match command:
            case Add(request, arrived):
                try:
                    self.scheduler.add(request, arrived)
                    self._meter.arrived(request, arrived)
                except RequestError as error:  # what submit could not know, e.g. a request aborted and sent again
                    self._deliver([_refusal(request, index, error) for index in range(request.params.n)])
            case Abort(request_id):
                self.scheduler.abort(request_id)
            case End():
                self._tell(self.scheduler.abort_all())
                self._ended = True


def _refusal(request: Request, index: int, error: RequestError) -> Chunk:
    return Chunk(request_id=request.id, index=index, finish_reason=FinishReason.ERROR, error=error.message)
