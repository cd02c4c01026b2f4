"""The programs of a step: forward (prefill, decode), sample, prompt logprobs.  Pure functions, compiled by the runner.

A call is handed one packed int32 array [R, HEAD + P]: slot, q_len, start, flags, page table.  Everything else lives on
the device: a prefill row reads its tokens from its slot at [start, start + q_len); a decode row reads token and
position from it, so that a step can be dispatched before the last one has been read."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.sharding import Mesh

from jaxserve.device import sampling
from jaxserve.device.attention import Attend, make_attend
from jaxserve.device.sampling import float_bits, pack_drawn
from jaxserve.device.slots import limits_of, rows_of
from jaxserve.device.state import KVPool, ModelShape, RowFlag, SlotState, StepInputs
from jaxserve.request import MAX_LOGPROBS

HEAD = 4  # slot, q_len, start, flags: the columns of a packed call before its page table
SCORED_WIDTH = 3 + 2 * MAX_LOGPROBS  # token, rank, logprob bits, top ids, top logprob bits
SCORE_BLOCK = 64  # positions scored at once: their logits are [64, V]

Params = dict  # of arrays or QTensors, string keys


class Model(Protocol):
    """What a step needs of a model (`jaxserve.models`)."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def dtype(self) -> str:
        """Of activations and KV: float32 or bfloat16."""
        ...

    def forward(
        self, params: Params, tokens: Array, positions: Array, pool: KVPool, attend: Attend
    ) -> tuple[Array, KVPool]:
        """tokens, positions [R, Q] -> hidden [R, Q, D] after the last norm, pool."""
        ...

    def logits(self, params: Params, hidden: Array) -> Array:
        """[..., D] -> [..., V] float32."""
        ...


@struct.dataclass
class Forwarded:
    """What forward leaves for the sampler."""

    hidden: Array | None  # [R * Q, D], for prompt logprobs: of prefill alone
    # With an axis of 1 in the middle a TPU would copy them into wider tiles.
    logits: Array  # [R, V] float32, of each row's last query; of verify [R, K+1, V], of every query
    kv_len: Array  # [R] int32; 0 = the row was inert


def prefill(model: Model, params: Params, pool: KVPool, slots: SlotState, packed: Array, *, queries: int,
            backend: str, mesh: Mesh) -> tuple[Forwarded, KVPool]:  # fmt: skip
    """A chunk of each row's prompt.  packed [R, HEAD + P] -> logits of each row's last query, pool."""
    slot, q_len, start = packed[:, 0], packed[:, 1], packed[:, 2]
    inputs = place(packed, start, q_len, queries)
    tokens = slots.tokens[slot[:, None], inputs.positions]
    attend = make_attend(inputs, backend=backend, mesh=mesh)
    hidden, pool = model.forward(params, tokens, inputs.positions, pool, attend)
    last = jnp.maximum(q_len - 1, 0)[:, None, None]
    logits = model.logits(params, jnp.take_along_axis(hidden, last, axis=1)[:, 0])  # gathered before the head
    return Forwarded(hidden=hidden.reshape(-1, hidden.shape[-1]), logits=logits, kv_len=inputs.kv_len), pool


def decode(model: Model, params: Params, pool: KVPool, slots: SlotState, packed: Array, *, backend: str,
           mesh: Mesh) -> tuple[Forwarded, KVPool]:  # fmt: skip
    """The last token of each row.  A row at its limit is inert: the host may not know yet that it ended."""
    slot = packed[:, 0]
    start = slots.kv_len[slot]
    q_len = jnp.where(slots.length[slot] < limits_of(slots, slot), packed[:, 1], 0)
    inputs = place(packed, start, q_len, 1)
    tokens = slots.tokens[slot[:, None], inputs.positions]
    attend = make_attend(inputs, backend=backend, mesh=mesh)
    hidden, pool = model.forward(params, tokens, inputs.positions, pool, attend)
    return Forwarded(hidden=None, logits=model.logits(params, hidden[:, 0]), kv_len=inputs.kv_len), pool


def place(packed: Array, start: Array, q_len: Array, queries: int) -> StepInputs:
    """Rows of q_len [R] queries, the first of each at position start [R]."""
    at = start[:, None] + lax.iota(jnp.int32, queries)[None, :]
    is_query = lax.iota(jnp.int32, queries)[None, :] < q_len[:, None]
    return StepInputs(
        q_len=q_len,
        page_table=packed[:, HEAD:],
        kv_len=jnp.where(q_len > 0, start + q_len, 0),
        positions=jnp.where(is_query, at, 0),
    )


def sample(slots: SlotState, logits: Array, kv_len: Array, packed: Array, mask: Array) -> tuple[Array, SlotState]:
    """Draw each row's next token and write it to its slot.

    logits [R, V], kv_len [R] of `Forwarded`, packed [R, HEAD + P], mask [R, V/32] uint32 (read where a row has
    RowFlag.MASK) -> drawn [R, DRAWN_WIDTH] int32, slots.  Rows that take no token write the scrap slot."""
    flags = packed[:, 3]
    takes = ((flags & RowFlag.TAKES_TOKEN) > 0) & (kv_len > 0)
    scrap = slots.length.shape[0] - 1
    slot = jnp.where(takes, packed[:, 0], scrap)
    drawn = sampling.draw(logits, rows_of(slots, slot), mask, flags)
    at = jnp.minimum(kv_len, slots.tokens.shape[1] - 1)
    slots = replace(
        slots,
        tokens=slots.tokens.at[slot, at].set(drawn.token),
        length=slots.length.at[slot].set(kv_len + 1),
        kv_len=slots.kv_len.at[slot].set(kv_len),
        counts=slots.counts.at[slot, drawn.token].add(1),
    )
    return pack_drawn(drawn, takes), slots


def prompt_logprobs(model: Model, params: Params, hidden: Array, slots: SlotState, where: Array) -> Array:
    """Score a block of one row's chunk: entry i is the logprob of the token at position + i + 1 given all before it.

    hidden [R * Q, D] of `Forwarded`; where [3] int32: the block's first row of hidden, its slot, its position.
    -> [min(R * Q, SCORE_BLOCK), SCORED_WIDTH] int32; entries past the row's chunk mean nothing."""
    begin, slot, position = where
    block = min(hidden.shape[0], SCORE_BLOCK)
    at = jnp.clip(position + 1 + lax.iota(jnp.int32, block), 0, slots.tokens.shape[1] - 1)
    targets = slots.tokens[slot, at]
    states = lax.dynamic_slice_in_dim(hidden, begin, block)
    logprob, rank, top_ids, top_logprobs = sampling.prompt_logprobs(
        lambda rows: model.logits(params, rows), states, targets
    )
    return jnp.concatenate(
        [targets[:, None], rank[:, None], float_bits(logprob)[:, None], top_ids, float_bits(top_logprobs)], axis=1
    )
