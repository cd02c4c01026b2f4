"""A device without a model.  Each token is derived from what its row READS through its pages, so a page freed too
early, a page read before it is written or a wrong position gives a wrong token, never only a wrong count.

The "model": the cell at position p is a hash of the token, p and all cells before it; the token drawn for position
p + 1 is a hash of the seed, p + 1 and the cells up to p.  Fresh pages hold NaN, which spreads to whatever reads it.

With `config.has_draft_pool` a draft keeps cells of its own in a second pool, and whoever reads one there that is not
what the row's tokens make it is told so by an AssertionError: the text would hide it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jaxserve.config import SchedulerConfig
from jaxserve.request import TokenLogprobs
from jaxserve.sched.plan import Call, Outcome, Plan, Row, RowOutcome, SlotLoad
from jaxserve.sched.speculation import choose

NAN = None
DRAFT = -1  # what tells a draft's cells from the target's
Cell = int | None  # None is NaN


def cell_of(token: int, position: int, before: Sequence[Cell]) -> Cell:
    """K/V of a token behind its prefix."""
    return NAN if NAN in before else hash((token, position, *before))


def draw(seed: int, position: int, cells: Sequence[Cell], vocab: int, masked: Collection[int] = ()) -> int:
    """The token of `position`, from the cells before it and none of `masked`."""
    value = hash((seed, position, *cells))
    while value % vocab in masked:
        value = hash((value, 1))
    return value % vocab


def logprob_of(cells: Sequence[Cell]) -> float:
    """A number that tells which cells the logits were computed from."""
    return -float(hash((*cells,)) % 1000)


@dataclass
class Slot:
    """What the device keeps of a sequence; the host only ever loads it whole."""

    load: SlotLoad
    tokens: list[int]
    length: int
    kv_len: int = 0
    is_nan: bool = False


@dataclass
class Pending:
    """A dispatched step.  It runs when somebody reads it, or any later step, at the latest."""

    device: FakeDevice
    plan: Plan
    outcome: Outcome | None = None

    def result(self) -> Outcome:
        while self.outcome is None:
            self.device.run_one()
        return self.outcome


@dataclass
class FakeDevice:
    """`accept` is the chance that a draft is right.  `clamps=False` breaks the device's half of the protocol: rows run
    past their limit; `writes_last=False` the draft's: it does not feed itself the last of its tokens.
    `poison[sequence]` is a position whose K/V becomes NaN."""

    config: SchedulerConfig
    vocab: int
    seed: int = 0
    accept: float = 0.6
    clamps: bool = True
    writes_last: bool = True
    poison: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.pages = self._fresh_pages()
        self.draft_pages = self._fresh_pages()
        self.slots: list[Slot | None] = [None] * self.config.slots
        self.queue: deque[Pending] = deque()

    def _fresh_pages(self) -> list[list[Cell]]:
        return [[NAN] * self.config.page_size for _ in range(self.config.num_pages)]

    def dispatch(self, plan: Plan) -> Pending:
        self.check(plan)
        pending = Pending(self, plan)
        self.queue.append(pending)
        return pending

    def run_one(self) -> None:
        """The oldest step: loads, then prefill, then decode, then the draft's, as the chain of programs would."""
        pending = self.queue.popleft()
        for load in pending.plan.loads:
            tokens = [*load.tokens, *[-1] * (self.config.max_len - len(load.tokens))]
            self.slots[load.slot] = Slot(load, tokens, len(load.tokens))
        call = pending.plan.decode
        prefill = [self._prefill(row) for row in _rows(pending.plan.prefill)]
        if call is None:
            found, shape = [], None
        else:
            found, shape = self._look_up(call)
        decode = [self._decode(row, drafts) for row, drafts in zip(_rows(call), found, strict=True)]
        for row in _rows(pending.plan.draft_prefill):
            self._draft_prefill(row)
        pending.outcome = Outcome(rows=(*prefill, *decode), decode_shape=shape)

    def _look_up(self, call: Call) -> tuple[list[int], tuple[int, int]]:
        """The drafts of each row that are verified, and the program that does it: a lookup may find nothing."""
        if not call.rungs:
            return [call.queries - 1] * len(call.rows), (call.rows_bucket, call.queries - 1)
        found = [self.random.choice((0, row.q_len - 1)) for row in call.rows]
        rung = choose(call.rungs, list(zip(call.acceptance, found, strict=True)))
        return [min(drafts, rung.drafts) for drafts in found], (rung.rows, rung.drafts)

    def check(self, plan: Plan) -> None:
        """What the host half owes the device: JAX would clip a wrong page id in silence."""
        assert plan.rows, "a plan without rows"
        for call in (plan.prefill, plan.decode, plan.draft_prefill):
            rows = _rows(call)
            assert len({row.slot for row in rows}) == len(rows), "two rows of a call in one slot"
            for row in rows:
                assert 0 <= row.slot < self.config.slots
                assert all(0 < page < self.config.num_pages for page in row.pages), f"page ids {row.pages}"
                assert len(set(row.pages)) == len(row.pages) <= self.config.pages_per_row
                assert 1 <= row.q_len <= call.queries
                assert not row.is_drafted or call.queries > 1, "a plain call runs no draft"
            if call is not None:
                assert len(rows) <= call.rows_bucket
        for call in (plan.prefill, plan.draft_prefill):
            assert call is None or (call.rows_bucket, call.queries) in self.config.prefill_buckets
        assert self.config.has_draft_pool or plan.draft_prefill is None
        if plan.decode:
            rows, drafts = plan.decode.rows_bucket, plan.decode.queries - 1
            assert (rows, drafts) in self.config.verify_calls or (drafts == 0 and rows in self.config.decode_buckets)
            assert all(rung.rows >= len(plan.decode.rows) for rung in plan.decode.rungs)
        sequences = [row.sequence for row in plan.rows]
        assert len(set(sequences)) == len(sequences), "a sequence has two rows in one step"

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        """Page and offset of a position.  Columns behind the row's pages are scrap; JAX clips the column."""
        column = min(position // self.config.page_size, self.config.pages_per_row - 1)
        return row.pages[column] if column < len(row.pages) else 0, position % self.config.page_size

    def _read(self, row: Row, length: int) -> list[Cell]:
        size = self.config.page_size
        cells = [cell for page in row.pages[: -(-length // size)] for cell in self.pages[page]][:length]
        return cells + [self._cell(row, position) for position in range(len(cells), length)]

    def _cell(self, row: Row, position: int) -> Cell:
        page, offset = self._place(row, position)
        return self.pages[page][offset]

    def _write(self, row: Row, start: int, tokens: Sequence[int]) -> list[Cell]:
        """Writes K/V of `tokens`, all of them, and only then reads: returns the cells up to the last one."""
        cells = self._read(row, start)
        for position, token in enumerate(tokens, start=start):
            poisoned = self.poison.get(row.sequence) == position
            cells.append(NAN if poisoned else cell_of(token, position, cells))
        for position in range(start, start + len(tokens)):
            page, offset = self._place(row, position)
            self.pages[page][offset] = cells[position]
        return self._read(row, start + len(tokens))

    def _draft_prefill(self, row: Row) -> None:
        slot, end = self.slots[row.slot], row.start + row.q_len
        if slot.is_nan:  # its last token was not drawn, and the host has not read yet that it ended
            end = min(end, slot.length)
        assert end <= slot.length, "the draft is to compute a token that nobody has drawn"
        self._draft_write(row, slot, row.start, slot.tokens[row.start : end])

    def _draft_write(self, row: Row, slot: Slot, start: int, tokens: Sequence[int]) -> None:
        """The draft's K/V of `tokens`, behind what it finds in its own pages."""
        cells: list[Cell] = []
        for position, token in enumerate([*slot.tokens[:start], *tokens]):
            cells.append(cell_of(token, position, [*cells, DRAFT]))
            page, offset = self._place(row, position)
            if position >= start:
                self.draft_pages[page][offset] = cells[-1]
            assert self.draft_pages[page][offset] == cells[-1], f"no K/V of the draft at position {position} of {start}"

    def _draw(self, slot: Slot, position: int, cells: Sequence[Cell]) -> int:
        masked = slot.load.stop_ids if position < slot.load.min_len else ()
        return draw(slot.load.seed, position, cells, self.vocab, masked)

    def _prefill(self, row: Row) -> RowOutcome:
        slot = self.slots[row.slot]
        end = row.start + row.q_len
        assert len(row.pages) * self.config.page_size >= end, "a chunk has no pages"
        cells = self._write(row, row.start, slot.tokens[row.start : end])
        scored = None
        if row.prompt_logprobs is not None:
            positions = range(row.prompt_logprobs_from, min(end, slot.load.prompt_len - 1))
            scored = tuple(TokenLogprobs(slot.tokens[p + 1], logprob_of(cells[: p + 1]), 1) for p in positions)
        if not row.takes_token:
            return RowOutcome(prompt_logprobs=scored)
        if NAN in cells:
            slot.is_nan = True
            return RowOutcome(is_nan=True)
        token = self._draw(slot, end, cells)
        self._append(slot, end, [token])
        return RowOutcome(token_ids=(token,), logprobs=_logprobs(row, [token], [cells]), prompt_logprobs=scored)

    def _decode(self, row: Row, drafts: int) -> RowOutcome:
        slot, start = self.slots[row.slot], self._start(row)
        q_len = min(row.q_len, 1 + drafts)
        q_len = min(q_len, slot.load.limit - slot.length) if self.clamps else q_len
        if q_len <= 0:
            return RowOutcome()
        last = slot.tokens[min(start, self.config.max_len - 1)]
        drafts = self._propose(slot, self._read(row, start), last, start, q_len - 1)
        if row.is_drafted:
            self._draft_write(row, slot, start, [last, *drafts][: None if self.writes_last else -1])
        assert row.is_drafted or not drafts or not self.config.has_draft_pool
        cells = self._write(row, start, [last, *drafts])
        seen = [cells[: start + i + 1] for i in range(q_len)]
        if NAN in cells:
            slot.is_nan = True
            return RowOutcome(is_nan=True)
        drawn = [self._draw(slot, start + i + 1, seen[i]) for i in range(q_len)]
        count = 1
        while count < q_len and drafts[count - 1] == drawn[count - 1]:
            count += 1
        self._append(slot, start + 1, drawn[:count])
        logprobs = _logprobs(row, drawn[:count], seen)
        return RowOutcome(token_ids=tuple(drawn[:count]), logprobs=logprobs, drafted=len(drafts))

    def _start(self, row: Row) -> int:
        """Only the device knows where a decode row stands."""
        return self.slots[row.slot].kv_len

    def _propose(self, slot: Slot, cells: list[Cell], token: int, position: int, count: int) -> list[int]:
        drafts = []
        for at in range(position, position + count):
            cells = [*cells, cell_of(token, at, cells)]
            is_right = self.random.random() < self.accept
            token = self._draw(slot, at + 1, cells) if is_right else self.random.randrange(self.vocab)
            drafts.append(token)
        return drafts

    def _append(self, slot: Slot, length: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start=length):
            slot.tokens[min(position, self.config.max_len - 1)] = token
        slot.length = length + len(tokens)
        slot.kv_len = slot.length - 1


def _rows(call: Call | None) -> tuple[Row, ...]:
    return call.rows if call else ()


def _logprobs(row: Row, tokens: Sequence[int], seen: Sequence[Sequence[Cell]]) -> tuple[TokenLogprobs, ...] | None:
    if row.logprobs is None:
        return None
    return tuple(TokenLogprobs(token, logprob_of(cells), 1) for token, cells in zip(tokens, seen, strict=False))
