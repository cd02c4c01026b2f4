"""The device state and everything that changes it: params, KV pool, slots, compiled programs; the pool of a draft that
has its own.

`dispatch(plan)` returns at once; `Pending.result()` waits.  Nothing else touches the pools or the slots, so their order
on the device is the order of dispatch.  No threads, no clock besides warm-up's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import jax
import numpy as np
from jax import Array

from jaxserve import batch
from jaxserve.catalogue import Catalogue
from jaxserve.device.speculate import Proposed
from jaxserve.device.state import KVPool, SlotState
from jaxserve.device.steps import SCORE_BLOCK, Forwarded, Params
from jaxserve.programs import Programs
from jaxserve.sched.plan import Call, Outcome, Plan
from jaxserve.sched.speculation import choose
from jaxserve.shelf import Shelf


@dataclass(slots=True)
class _PendingCall:
    call: Call
    packed: np.ndarray  # [R, HEAD + P] int32
    forwarded: Forwarded
    scored: dict[
        int, list[tuple[int, Array]]
    ]  # row -> blocks of prompt logprobs: entries to skip, [block, SCORED_WIDTH]
    is_decode: bool = False  # or verify
    proposed: Proposed | None = None  # of a verify call
    drawn: Array | None = None  # what `sample` or `accept` returned, once it has been dispatched

    def outcomes(self):
        assert self.drawn is not None, "the sampler of this call was not dispatched"
        scored = {
            row: np.concatenate([np.asarray(block)[skip:] for skip, block in blocks])
            for row, blocks in self.scored.items()
        }
        if self.proposed is not None:
            return batch.read_verified(self.call, np.asarray(self.drawn))
        return batch.read_call(self.call, np.asarray(self.drawn), scored)


@dataclass(slots=True)
class Pending:
    """A dispatched plan.  If `plan.is_masked`, `Runner.sample(pending, masks)` must follow: the calls with masked rows
    wait for it."""

    plan: Plan
    calls: list[_PendingCall] = field(default_factory=list)  # in the order of plan.rows

    def result(self) -> Outcome:
        """Waits for the device."""
        rows = tuple(chain.from_iterable([call.outcomes() for call in self.calls]))
        decode = next((call.call for call in self.calls if call.is_decode), None)
        return Outcome(rows, (decode.rows_bucket, decode.queries - 1) if decode else None)


class Runner:
    """Owns the device."""

    def __init__(self, params: Params, catalogue: Catalogue, shelf: Shelf | None = None):
        self.params = params
        self._weights = jax.tree.leaves(params)
        self.catalogue = catalogue
        self.scheduler = catalogue.scheduler
        self.programs = Programs(shelf)
        self.pool: KVPool = catalogue.new_pool()
        self.slots: SlotState = catalogue.new_slots()
        self.draft_pool: KVPool | None = catalogue.new_draft_pool()
        self._draft_weights = jax.tree.leaves(catalogue.draft.weights(params)) if catalogue.draft else []
        self._no_mask: dict[tuple[int, int], Array] = {}  # (rows, positions) -> every id allowed
        self._flags: dict[int, int] = {}  # slot -> sampler flags of its owner
        self._last_decode: tuple[Call, np.ndarray] | None = None  # with what was packed of it

    def warm_up(self) -> tuple[float, ...]:
        """Compile every program and run the largest of each kind.  -> seconds of each prefill bucket: two are measured,
        those between lie on the line through them."""
        self.programs.compile(self.catalogue.wanted(self.params))
        self._time_call(Call((), self.scheduler.decode_buckets[-1], 1), is_decode=True)
        for rows, drafts in self.scheduler.verify_calls[-1:]:
            self._time_call(Call((), rows, 1 + drafts), is_decode=True)
        buckets = self.scheduler.prefill_buckets
        measured = {rows * chunk: self._time_prefill(rows, chunk) for rows, chunk in (buckets[0], buckets[-1])}
        seconds = np.interp([rows * chunk for rows, chunk in buckets], list(measured), list(measured.values()))
        jax.block_until_ready((self.pool, self.slots))
        return tuple(seconds.tolist())

    @property
    def _vocab(self) -> int:
        return self.catalogue.model.shape.vocab

    def _time_prefill(self, rows: int, chunk: int) -> float:
        """The first run of a program also pays for its memory, and a busy machine may slow any: the best of three."""
        return min(self._time_call(Call((), rows, chunk), is_decode=False) for _ in range(3))

    def _time_call(self, call: Call, *, is_decode: bool) -> float:
        """Run one call of full rows on the scrap slot and scrap page."""
        packed = np.zeros((call.rows_bucket, self.catalogue.packed_columns), np.int32)
        packed[:, 0], packed[:, 1] = self.scheduler.slots, call.queries
        began = time.perf_counter()
        pending = self._forward(call, packed, is_decode=is_decode)
        self._sample(pending, {})
        if not is_decode:
            self._prefill_draft(call, packed)
        jax.block_until_ready((pending.drawn, self.draft_pool))
        return time.perf_counter() - began

    def run_decode(self, call: Call, packed: np.ndarray, proposed: Proposed | None = None) -> None:
        """One decode or, with drafts, verify call and its sampler, to the end."""
        if proposed is None:
            pending = self._forward(call, packed, is_decode=True)
        else:
            forwarded = self._run_verify(call, packed, proposed)
            pending = _PendingCall(call, packed, forwarded, {}, True, proposed)
        self._sample(pending, {})
        jax.block_until_ready(pending.drawn)

    def dispatch(self, plan: Plan) -> Pending:
        """Enqueue the plan: slot loads, forward calls and the samplers of those in which no row waits for a mask."""
        for load in plan.loads:
            self._flags[load.slot] = batch.sampler_flags(load.params)
            self.slots = self.programs["load"](self.slots, batch.pack_load(load, self.catalogue.slot_shape))
        # Decode first: streaming rows should not wait for a prompt.
        decode = self._forward(plan.decode, self._pack_decode(plan.decode), is_decode=True) if plan.decode else None
        prefill = self._forward(plan.prefill, self._pack(plan.prefill), is_decode=False) if plan.prefill else None
        pending = Pending(plan, [call for call in (prefill, decode) if call])
        for call in reversed(pending.calls):
            if not call.call.is_masked:
                self._sample(call, {})
        if plan.draft_prefill:  # last: no token waits for it
            self._prefill_draft(plan.draft_prefill, self._pack(plan.draft_prefill))
        return pending

    def drafts(self, pending: Pending) -> dict[int, list[int]]:
        """sequence -> the drafts of its masked row.  Waits for `propose` alone: the forward call computes meanwhile."""
        drafts: dict[int, list[int]] = {}
        for call in pending.calls:
            if call.call.is_masked and call.proposed is not None:
                drafts |= batch.read_drafts(
                    call.call, np.asarray(call.proposed.tokens), np.asarray(call.proposed.count)
                )
        return drafts

    def sample(self, pending: Pending, masks: Mapping[int, np.ndarray]) -> None:
        """Enqueue the samplers that waited.  masks: sequence -> [1 + drafts, W]; a row without one has ended."""
        for call in reversed(pending.calls):
            if call.call.is_masked:
                rows = {i: masks[row.sequence] for i, row in enumerate(call.call.rows) if row.sequence in masks}
                self._sample(call, rows)

    def _pack(self, call: Call, last: tuple[Call, np.ndarray] | None = None) -> np.ndarray:
        return batch.pack_call(
            call, self._flags, scrap_slot=self.scheduler.slots, columns=self.scheduler.pages_per_row,
            num_pages=self.scheduler.num_pages, last=last,
        )  # fmt: skip

    def _pack_decode(self, call: Call) -> np.ndarray:
        packed = self._pack(call, self._last_decode)
        self._last_decode = (call, packed)
        return packed

    def _forward(self, call: Call, packed: np.ndarray, *, is_decode: bool) -> _PendingCall:
        if is_decode and call.queries > 1:
            return self._verify(call, packed)
        name = f"decode {call.rows_bucket}" if is_decode else f"prefill {call.rows_bucket}x{call.queries}"
        forwarded, self.pool = self.programs[name](self._weights, self.pool, self.slots, packed)
        scored = {} if is_decode else self._score_rows(forwarded.hidden, call)
        return _PendingCall(call, packed, forwarded, scored, is_decode)

    def _verify(self, call: Call, packed: np.ndarray) -> _PendingCall:
        proposed = self.propose(call.rows_bucket, packed)
        if call.rungs:
            # This waits for the step before: what a lookup finds hangs on its last token.  Nothing else does, and the
            # device stands still for no longer than it takes to read the counts and come back.
            found = np.asarray(proposed.count).tolist()
            rung = choose(call.rungs, list(zip(call.acceptance, found, strict=False)))
            call = replace(call, rows_bucket=rung.rows, queries=1 + rung.drafts)
            if rung.drafts == 0:
                packed = packed[: rung.rows].copy()
                packed[:, 1] = np.minimum(packed[:, 1], 1)
                return self._forward(call, packed, is_decode=True)
        forwarded = self._run_verify(call, packed, proposed)
        return _PendingCall(call, packed, forwarded, {}, True, proposed)

    def propose(self, rows: int, packed: np.ndarray) -> Proposed:
        program = self.programs[f"propose {rows}"]
        if self.draft_pool is None:
            proposed, self.pool = program(self._draft_weights, self.pool, self.slots, packed)
        else:
            proposed, self.draft_pool = program(self._draft_weights, self.draft_pool, self.slots, packed)
        return proposed

    def _run_verify(self, call: Call, packed: np.ndarray, proposed: Proposed) -> Forwarded:
        program = self.programs[f"verify {call.rows_bucket}x{call.queries}"]
        forwarded, self.pool = program(self._weights, self.pool, self.slots, packed, proposed)
        return forwarded

    def _prefill_draft(self, call: Call, packed: np.ndarray) -> None:
        if self.draft_pool is not None:
            program = self.programs[f"draft prefill {call.rows_bucket}x{call.queries}"]
            self.draft_pool = program(self._draft_weights, self.draft_pool, self.slots, packed)

    def _score_rows(self, hidden: Array, call: Call) -> dict[int, list[tuple[int, Array]]]:
        """Prompt logprobs of the rows of a prefill call that want some."""
        return {
            i: self._score(hidden, call, i)
            for i, row in enumerate(call.rows)
            if row.prompt_logprobs is not None and row.prompt_logprobs_from < row.start + row.q_len
        }

    def _score(self, hidden: Array, call: Call, index: int) -> list[tuple[int, Array]]:
        """Prompt logprobs of one row, block by block.  -> (entries to skip, [block, SCORED_WIDTH])."""
        row, total = call.rows[index], hidden.shape[0]
        own, block = index * call.queries, min(total, SCORE_BLOCK)
        blocks = []
        for first in range(own + row.prompt_logprobs_from - row.start, own + row.q_len, block):
            begin = min(first, total - block)  # a block never reaches past the call: it begins earlier instead
            where = np.array([begin, row.slot, row.start + begin - own], np.int32)
            blocks.append((first - begin, self.programs[f"score {total}"](self._weights, hidden, self.slots, where)))
        return blocks

    def _sample(self, pending: _PendingCall, masks: Mapping[int, np.ndarray]) -> None:
        rows, positions = pending.call.rows_bucket, 1
        forwarded, name, drafts = pending.forwarded, f"sample {rows}", ()
        if pending.proposed is not None:
            positions = pending.call.queries
            name, drafts = f"accept {rows}x{positions}", (pending.proposed,)
        mask = self._pack_masks(masks, rows, positions)
        pending.drawn, self.slots = self.programs[name](
            self.slots, forwarded.logits, forwarded.kv_len, pending.packed, mask, *drafts
        )

    def _pack_masks(self, masks: Mapping[int, np.ndarray], rows: int, positions: int) -> np.ndarray | Array:
        if masks:
            return batch.pack_masks(masks, rows, positions, self._vocab)
        if (rows, positions) not in self._no_mask:
            every = batch.pack_masks({}, rows, positions, self._vocab)
            self._no_mask[rows, positions] = jax.device_put(every, self.catalogue.replicated)
        return self._no_mask[rows, positions]
