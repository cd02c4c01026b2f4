"""The device state and everything that changes it: params, KV pool, slots, compiled programs.

`dispatch(plan)` returns at once; `Pending.result()` waits.  Nothing else touches the pool or the slots, so their order
on the device is the order of dispatch.  No threads, no clock besides warm-up's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from jaxserve import batch
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.device import steps
from jaxserve.device.attention import POOL
from jaxserve.device.slots import load_slot, load_width
from jaxserve.device.state import KVPool, SlotShape, SlotState
from jaxserve.device.steps import HEAD, Forwarded, Model, Params
from jaxserve.programs import Programs, Wanted
from jaxserve.sched.plan import Call, Outcome, Plan


@dataclass(slots=True)
class _PendingCall:
    call: Call
    packed: np.ndarray  # [R, HEAD + P] int32
    forwarded: Forwarded
    scored: dict[int, Array]  # row -> [Q, SCORED_WIDTH]
    drawn: Array | None = None  # [R, DRAWN_WIDTH], once the sampler has been dispatched

    def outcomes(self):
        assert self.drawn is not None, "the sampler of this call was not dispatched"
        scored = {row: np.asarray(values) for row, values in self.scored.items()}
        return batch.read_call(self.call, np.asarray(self.drawn), scored)


@dataclass(slots=True)
class Pending:
    """A dispatched plan.  If `plan.is_masked`, `Runner.sample(pending, masks)` must follow."""

    plan: Plan
    calls: list[_PendingCall] = field(default_factory=list)  # in the order of plan.rows

    def result(self) -> Outcome:
        """Waits for the device."""
        return Outcome(tuple(row for call in self.calls for row in call.outcomes()))


class Runner:
    """Owns the device.  `scheduler` holds the numbers that the scheduler must keep to."""

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        config: EngineConfig,
        scheduler: SchedulerConfig,
        mesh: Mesh,
        backend: str,
    ):
        self.model = model
        self.params = params
        self.scheduler = scheduler
        self.programs = Programs()
        self._mesh = mesh
        self._backend = backend
        shape = model.shape
        self._slot_shape = SlotShape(
            slots=scheduler.slots, max_len=scheduler.max_len, vocab=shape.vocab, stop_ids=config.max_stop_ids,
            biases=config.max_logit_bias, allowed_ids=config.max_allowed_ids,
        )  # fmt: skip
        self._pool_dtype = jax.tree.leaves(params)[0].dtype
        self._replicated = NamedSharding(mesh, Spec())
        self._pool_sharding = NamedSharding(mesh, POOL)  # a prefix of the pool's tree
        make_pool = partial(
            KVPool.zeros, shape, pages=scheduler.num_pages, page_size=scheduler.page_size, dtype=self._pool_dtype
        )
        self.pool: KVPool = jax.jit(make_pool, out_shardings=self._pool_sharding)()
        self.slots: SlotState = jax.jit(partial(SlotState.empty, self._slot_shape), out_shardings=self._replicated)()
        self._no_mask = {rows: self._full_mask(rows) for rows in self._row_buckets()}
        self._flags: dict[int, int] = {}  # slot -> sampler flags of its owner

    # -- programs ------------------------------------------------------------------------------------------------

    def warm_up(self) -> tuple[float, ...]:
        """Compile every program and run each once.  -> seconds of each prefill bucket."""
        self.programs.compile(self._wanted())
        for rows in self.scheduler.decode_buckets:
            self._time_call(Call((), rows, 1), is_decode=True)
        seconds = tuple(
            self._time_call(Call((), rows, chunk), is_decode=False) for rows, chunk in self.scheduler.prefill_buckets
        )
        jax.block_until_ready((self.pool, self.slots))
        return seconds

    def _row_buckets(self) -> list[int]:
        return sorted({*self.scheduler.decode_buckets, *(rows for rows, _ in self.scheduler.prefill_buckets)})

    def _full_mask(self, rows: int) -> Array:
        return jax.device_put(batch.pack_masks({}, rows, self.model.shape.vocab), self._replicated)

    def _wanted(self) -> Wanted:
        """The whole list."""
        params, pool, slots = (jax.tree.map(_abstract, tree) for tree in (self.params, self.pool, self.slots))
        shape, columns = self.model.shape, self.scheduler.pages_per_row
        replicated = self._replicated
        common = {"backend": self._backend, "mesh": self._mesh}

        def array(shape, dtype=jnp.int32):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

        forward_out = (replicated, self._pool_sharding)
        wanted: Wanted = {
            "load": (
                jax.jit(partial(load_slot, shape=self._slot_shape), donate_argnums=0, out_shardings=replicated),
                (slots, array((load_width(self._slot_shape),))),
            )
        }
        for rows in self.scheduler.decode_buckets:
            step = jax.jit(partial(steps.decode, self.model, **common), donate_argnums=1, out_shardings=forward_out)
            wanted[f"decode {rows}"] = (step, (params, pool, slots, array((rows, HEAD + columns))))
        for rows, chunk in self.scheduler.prefill_buckets:
            step = partial(steps.prefill, self.model, queries=chunk, **common)
            step = jax.jit(step, donate_argnums=1, out_shardings=forward_out)
            wanted[f"prefill {rows}x{chunk}"] = (step, (params, pool, slots, array((rows, HEAD + columns))))
            score = jax.jit(partial(steps.prompt_logprobs, self.model), out_shardings=replicated)
            hidden = array((rows, chunk, shape.width), self._pool_dtype)
            wanted[f"score {rows}x{chunk}"] = (score, (params, hidden, slots, array((rows, HEAD + columns)), array(())))
        for rows in self._row_buckets():
            logits, mask = array((rows, 1, shape.vocab), jnp.float32), _abstract(self._no_mask[rows])
            draw = jax.jit(steps.sample, donate_argnums=0, out_shardings=replicated)
            wanted[f"sample {rows}"] = (draw, (slots, logits, array((rows,)), array((rows, HEAD + columns)), mask))
        return wanted

    def _time_call(self, call: Call, *, is_decode: bool) -> float:
        """Run one call of full rows on the scrap slot and scrap page."""
        packed = np.zeros((call.rows_bucket, HEAD + self.scheduler.pages_per_row), np.int32)
        packed[:, 0], packed[:, 1] = self.scheduler.slots, call.queries
        began = time.perf_counter()
        pending = self._forward(call, packed, is_decode=is_decode)
        self._sample(pending, {})
        jax.block_until_ready(pending.drawn)
        return time.perf_counter() - began

    # -- a step --------------------------------------------------------------------------------------------------

    def dispatch(self, plan: Plan) -> Pending:
        """Enqueue the plan: slot loads, forward calls and, unless a row waits for a late mask, their samplers."""
        for load in plan.loads:
            self._flags[load.slot] = batch.sampler_flags(load.params)
            self.slots = self.programs["load"](self.slots, batch.pack_load(load, self._slot_shape))
        # Decode first: streaming rows should not wait for a prompt.
        decode = self._forward(plan.decode, self._pack(plan.decode), is_decode=True) if plan.decode else None
        prefill = self._forward(plan.prefill, self._pack(plan.prefill), is_decode=False) if plan.prefill else None
        pending = Pending(plan, [call for call in (prefill, decode) if call])
        if not plan.is_masked:
            self.sample(pending, {})
        return pending

    def sample(self, pending: Pending, masks: Mapping[int, bytes]) -> None:
        """Enqueue the samplers of a dispatched plan.  masks: sequence -> mask words."""
        for call in reversed(pending.calls):
            rows = {i: masks[row.sequence] for i, row in enumerate(call.call.rows) if row.sequence in masks}
            self._sample(call, rows)

    def _pack(self, call: Call) -> np.ndarray:
        return batch.pack_call(
            call, self._flags, scrap_slot=self.scheduler.slots, columns=self.scheduler.pages_per_row,
            num_pages=self.scheduler.num_pages,
        )  # fmt: skip

    def _forward(self, call: Call, packed: np.ndarray, *, is_decode: bool) -> _PendingCall:
        name = f"decode {call.rows_bucket}" if is_decode else f"prefill {call.rows_bucket}x{call.queries}"
        forwarded, self.pool = self.programs[name](self.params, self.pool, self.slots, packed)
        scored = {}
        for i, row in enumerate(call.rows):
            if row.prompt_logprobs is not None:
                score = self.programs[f"score {call.rows_bucket}x{call.queries}"]
                scored[i] = score(self.params, forwarded.hidden, self.slots, packed, np.int32(i))
        return _PendingCall(call, packed, forwarded, scored)

    def _sample(self, pending: _PendingCall, masks: Mapping[int, bytes]) -> None:
        rows = pending.call.rows_bucket
        mask = batch.pack_masks(dict(masks), rows, self.model.shape.vocab) if masks else self._no_mask[rows]
        forwarded = pending.forwarded
        pending.drawn, self.slots = self.programs[f"sample {rows}"](
            self.slots, forwarded.logits, forwarded.kv_len, pending.packed, mask
        )


def _abstract(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
