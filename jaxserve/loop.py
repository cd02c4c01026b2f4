"""The loop: `schedule`, `dispatch`, `commit`, one step ahead of what has been read.

Runs in one thread and owns the scheduler and the runner there.  Knows no sockets and no event loops: commands come in
through the inbox, chunks leave through `deliver`."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.late import LateMasks, StopStrings
from jaxserve.request import Chunk, FinishReason, Request, RequestError
from jaxserve.runner import Pending, Runner
from jaxserve.sched.scheduler import Scheduler
from jaxserve.text import Tokenizer

HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class End:
    """Abort whatever is left and leave the loop."""


class Loop:
    """`run` until End.  `deliver(chunks)` is called at most once a step."""

    def __init__(
        self, *, runner: Runner, scheduler: Scheduler, tokenizer: Tokenizer, deliver: Callable[[Sequence[Chunk]], None]
    ):
        self.inbox: queue.SimpleQueue[Add | Abort | End] = queue.SimpleQueue()
        self.scheduler = scheduler
        self.beat = time.monotonic()
        self.host_seconds = 0.0  # CPU time of this thread
        self._runner = runner
        self._deliver = deliver
        self._stop_strings = StopStrings(tokenizer)
        self._masks = LateMasks(runner.catalogue.mask_words)
        self._ended = False

    def run(self) -> None:
        unread: Pending | None = None
        while not self._ended:
            self._read_inbox(wait=unread is None and not self.scheduler.has_unfinished)
            unread = self.step(unread)

    def step(self, unread: Pending | None) -> Pending | None:
        """Dispatch the next plan, then read the one before it.  -> the plan that is now unread."""
        now = time.monotonic()
        plan = self.scheduler.schedule(now)
        pending = self._runner.dispatch(plan) if plan else None
        chunks = self._commit(unread) if unread else self.scheduler.drain()
        if pending and pending.plan.is_masked:
            drafts = self._runner.drafts(pending)
            self._runner.sample(pending, self._masks.words(pending.plan, self.scheduler, drafts))
            chunks += self.scheduler.drain()  # of sequences that have no mask any more
        if chunks:
            self._deliver([self._stop_strings.finish(chunk) for chunk in chunks])
        self.beat = now
        self.host_seconds = time.thread_time()
        return pending

    def fail(self, error: str) -> None:
        """The loop died: every stream ends with an error."""
        self._deliver([self._stop_strings.finish(chunk) for chunk in self.scheduler.fail_all(error)])

    def _commit(self, unread: Pending) -> list[Chunk]:
        outcome = unread.result()
        cuts = self._stop_strings.search(unread.plan, outcome, self.scheduler)
        chunks = self.scheduler.commit(unread.plan, outcome, cuts, time.monotonic())
        self._masks.forget({row.sequence for row in unread.plan.rows if self.scheduler.current(row) is None})
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
            case Add(request):
                try:
                    self.scheduler.add(request, time.monotonic())
                except RequestError as error:  # what submit could not know, e.g. a request aborted and sent again
                    self._deliver([_refusal(request, index, error) for index in range(request.params.n)])
            case Abort(request_id):
                self.scheduler.abort(request_id)
            case End():
                self._deliver([self._stop_strings.finish(chunk) for chunk in self.scheduler.abort_all()])
                self._ended = True


def _refusal(request: Request, index: int, error: RequestError) -> Chunk:
    return Chunk(request_id=request.id, index=index, finish_reason=FinishReason.ERROR, error=error.message)
