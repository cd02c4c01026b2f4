"""Speculation: a draft proposes tokens, one verify call computes the target's answer to all of them, `accept` keeps the
longest run that the target draws itself.

By coupling (Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative
decoding"): the target's token at every position is drawn exactly as plain sampling draws it there, from the row's noise
for that position, and a draft counts if it is that token.  So the text is the same with any draft, any number of them,
or none, and a draft needs no probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.sharding import Mesh

from jaxserve.device import sampling
from jaxserve.device.attention import make_attend
from jaxserve.device.sampling import DRAWN_WIDTH, pack_drawn
from jaxserve.device.sharding import abstract, local_bytes
from jaxserve.device.slots import limits_of, rows_of
from jaxserve.device.state import KVPool, RowFlag, SlotState
from jaxserve.device.steps import Forwarded, Model, Params, place
from jaxserve.quant.panels import holds_panels


@struct.dataclass
class Proposed:
    """K drafts a row at the most; those from `count` on mean nothing.  A verify call may take fewer of them than K."""

    tokens: Array  # [R, K] int32
    count: Array  # [R] int32

    @staticmethod
    def empty(rows: int, drafts: int) -> Proposed:
        return Proposed(tokens=jnp.zeros((rows, drafts), jnp.int32), count=jnp.zeros((rows,), jnp.int32))


class Draft(Protocol):
    """Where drafts come from.  Whatever it proposes, the text stays the target's."""

    @property
    def is_lookup(self) -> bool:
        """It costs next to nothing and may find nothing: how many drafts are verified is chosen when it has looked."""
        ...

    def weights(self, params: Params) -> Params:
        """What `propose` is handed of the target's weights."""
        ...

    def describe(self, params: Params) -> Params:
        """Shapes, dtypes and places of `weights`."""
        ...

    def own_bytes(self, params: Params) -> int:
        """What `weights` takes on each device beside the target's own."""
        ...

    def propose(
        self, params: Params, pool: KVPool, slots: SlotState, packed: Array, *, drafts: int, backend: str, mesh: Mesh
    ) -> tuple[Proposed, KVPool]:
        """packed [R, HEAD + P]; pool: its own, else the target's.  May write K/V only at the positions that the verify
        call will write."""
        ...


@dataclass(frozen=True, slots=True)
class NGram:
    """Prompt lookup: what followed the last place where the row's newest tokens stood before.

    Of all earlier places the one that agrees with the most of the newest `longest` tokens is taken, the latest of
    equals; fewer than `shortest` are no reason to expect anything, and the row goes without drafts."""

    longest: int = 6
    shortest: int = 2
    is_lookup: bool = True

    def weights(self, params: Params) -> Params:
        return {}

    def describe(self, params: Params) -> Params:
        return {}

    def own_bytes(self, params: Params) -> int:
        return 0

    def propose(
        self, params: Params, pool: KVPool, slots: SlotState, packed: Array, *, drafts: int, backend: str, mesh: Mesh
    ) -> tuple[Proposed, KVPool]:
        slot, start = packed[:, 0], slots.kv_len[packed[:, 0]]
        tokens, count = jax.vmap(self._look_up, (0, 0, None))(slots.tokens[slot], start + 1, drafts)
        return Proposed(tokens=tokens, count=jnp.where(queries_of(slots, packed) > 1, count, 0)), pool

    def _look_up(self, tokens: Array, length: Array, drafts: int) -> tuple[Array, Array]:
        """tokens [max_len], length of them known -> drafts [K], count."""
        at = lax.iota(jnp.int32, tokens.shape[0])
        agreed = jnp.zeros(tokens.shape, jnp.int32)  # of the newest tokens, those that stand before and at each place
        agrees = at < length - 1
        for back in range(self.longest):
            newest = tokens[jnp.maximum(length - 1 - back, 0)]
            agrees &= (jnp.roll(tokens, back) == newest) & (at >= back)
            agreed += agrees.astype(jnp.int32)
        best = jnp.argmax(agreed * tokens.shape[0] + at).astype(jnp.int32)
        # Past the newest token the text is taken to repeat with the distance between the two places.
        period = jnp.maximum(length - 1 - best, 1)
        ahead = lax.rem(lax.iota(jnp.int32, drafts), period)
        is_found = jnp.max(agreed) >= self.shortest
        return tokens[jnp.minimum(best + 1 + ahead, tokens.shape[0] - 1)], jnp.where(is_found, drafts, 0)


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The target's own first layers and its head.  They read and write the target's pool: the K/V of the past is
    exact, and what a draft writes the verify call writes again."""

    model: Model  # of those layers alone
    is_lookup: bool = False

    def weights(self, params: Params) -> Params:
        layers = self.model.shape.layers
        blocks = params["blocks"]
        # A stacked tree is cut once, at start; a list and panels share the target's arrays.
        if isinstance(blocks, list):
            blocks = blocks[:layers]
        elif not holds_panels(blocks):
            blocks = jax.tree.map(lambda leaf: _cut(leaf, layers), blocks)
        return {"outer": params["outer"], "blocks": blocks}

    def describe(self, params: Params) -> Params:
        # Of the arrays themselves: how a part of stacked weights lies in memory is known once it is cut.
        return jax.tree.map(abstract, self.weights(params))

    def own_bytes(self, params: Params) -> int:
        blocks = params["blocks"]
        return 0 if isinstance(blocks, list) or holds_panels(blocks) else local_bytes(self.describe(params)["blocks"])

    def propose(
        self, params: Params, pool: KVPool, slots: SlotState, packed: Array, *, drafts: int, backend: str, mesh: Mesh
    ) -> tuple[Proposed, KVPool]:
        proposed, _, pool = roll_out(self.model, params, pool, slots, packed, drafts=drafts, backend=backend, mesh=mesh)
        return proposed, pool


def _cut(stacked: Array | jax.ShapeDtypeStruct, layers: int) -> Array | jax.ShapeDtypeStruct:
    """The first layers of a leaf, or of its description."""
    if isinstance(stacked, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((layers, *stacked.shape[1:]), stacked.dtype, sharding=stacked.sharding)
    return stacked[:layers]


def roll_out(
    model: Model, params: Params, pool: KVPool, slots: SlotState, packed: Array, *, drafts: int, backend: str,
    mesh: Mesh,
) -> tuple[Proposed, Array, KVPool]:  # fmt: skip
    """Let a model draw tokens behind each row's newest, as the row's own sampling would.

    -> drafts, of the rows with the most of them the last one [R] (no step was fed it), pool."""
    slot, queries = packed[:, 0], queries_of(slots, packed)
    start = slots.kv_len[slot]
    flags = packed[:, 3] & ~(RowFlag.LOGPROBS | RowFlag.MASK)
    no_mask = jnp.zeros((slot.shape[0], -(-model.shape.vocab // 32)), jnp.uint32)

    def step(i, carry):
        token, rows, pool, tokens = carry
        takes = i < queries
        inputs = place(packed, start + i, takes.astype(jnp.int32), 1)
        attend = make_attend(inputs, backend=backend, mesh=mesh)
        hidden, pool = model.forward(params, token[:, None], inputs.positions, pool, attend)
        drawn = sampling.draw(model.logits(params, hidden)[:, 0], rows, no_mask, flags)
        tokens = lax.dynamic_update_index_in_dim(tokens, drawn.token, i, 1)
        return drawn.token, sampling.record(rows, drawn.token, takes), pool, tokens

    count = jnp.clip(queries - 1, 0, drafts)
    tokens = Proposed.empty(slot.shape[0], drafts).tokens
    carry = (slots.tokens[slot, start], rows_of(slots, slot), pool, tokens)
    # As many steps as the row with the most drafts wants, so one program serves every K.
    newest, _, pool, tokens = lax.fori_loop(0, jnp.max(count), step, carry)
    return Proposed(tokens=tokens, count=count), newest, pool


def verify(
    model: Model, params: Params, pool: KVPool, slots: SlotState, packed: Array, proposed: Proposed, *, drafts: int,
    backend: str, mesh: Mesh,
) -> tuple[Forwarded, KVPool]:  # fmt: skip
    """The last token of each row and the first `drafts` (K) of its drafts -> logits [R, K+1, V] of all of them."""
    slot = packed[:, 0]
    start = slots.kv_len[slot]
    q_len = jnp.minimum(queries_of(slots, packed), 1 + jnp.minimum(proposed.count, drafts))
    inputs = place(packed, start, q_len, 1 + drafts)
    tokens = jnp.concatenate([slots.tokens[slot, start][:, None], proposed.tokens[:, :drafts]], axis=1)
    attend = make_attend(inputs, backend=backend, mesh=mesh)
    hidden, pool = model.forward(params, tokens, inputs.positions, pool, attend)
    return Forwarded(hidden=None, logits=model.logits(params, hidden), kv_len=inputs.kv_len), pool


def accept(
    slots: SlotState, logits: Array, kv_len: Array, packed: Array, mask: Array, proposed: Proposed
) -> tuple[Array, SlotState]:
    """Draw each row's tokens up to and including the first that is not its draft, and write them to its slot.

    logits [R, K+1, V], kv_len [R] of `verify`; mask [R, K+1, V/32] uint32 (read where a row has RowFlag.MASK): a row
    ends before a position that allows nothing
    -> drawn [R, 1 + (K+1) * DRAWN_WIDTH] int32 (drafts verified, then the draws), slots."""
    flags, scrap = packed[:, 3], slots.length.shape[0] - 1
    start = slots.kv_len[packed[:, 0]]
    q_len = jnp.where((flags & RowFlag.TAKES_TOKEN) > 0, jnp.maximum(kv_len - start, 0), 0)
    slot = jnp.where(q_len > 0, packed[:, 0], scrap)
    queries = logits.shape[1]
    drafts = jnp.pad(proposed.tokens[:, : queries - 1], ((0, 0), (0, 1)), constant_values=-1)
    is_open = jnp.any(mask != 0, axis=2) | ((flags & RowFlag.MASK) == 0)[:, None]  # [R, K+1]

    def step(carry, i):
        rows, agrees = carry
        at_position = partial(lax.dynamic_index_in_dim, index=i, axis=1, keepdims=False)
        takes = agrees & (i < q_len) & at_position(is_open)
        drawn = sampling.draw(at_position(logits), rows, at_position(mask), flags)
        draft = at_position(drafts)
        rows = sampling.record(rows, drawn.token, takes)
        return (rows, takes & (drawn.token == draft) & ~drawn.is_nan), (drawn.token, takes, pack_drawn(drawn, takes))

    carry = (rows_of(slots, slot), jnp.ones(slot.shape, jnp.bool_))
    _, (tokens, takes, drawn) = lax.scan(step, carry, lax.iota(jnp.int32, queries))
    tokens, takes = tokens.T, takes.T  # [R, K+1]
    taken = takes.sum(axis=1, dtype=jnp.int32)
    at = start[:, None] + 1 + lax.iota(jnp.int32, queries)[None, :]
    at = jnp.where(takes, at, slots.tokens.shape[1])  # past the end: dropped
    slots = replace(
        slots,
        tokens=slots.tokens.at[slot[:, None], at].set(tokens, mode="drop"),
        length=slots.length.at[slot].set(start + taken + 1),
        kv_len=slots.kv_len.at[slot].set(start + taken),
        counts=slots.counts.at[slot[:, None], tokens].add(takes.astype(jnp.int32)),
    )
    drawn = drawn.swapaxes(0, 1).reshape(slot.shape[0], queries * DRAWN_WIDTH)
    return jnp.concatenate([jnp.maximum(q_len - 1, 0)[:, None], drawn], axis=1), slots


def queries_of(slots: SlotState, packed: Array) -> Array:
    """[R]: a row's last token and as many drafts as its plan and its limit allow; 0 = inert."""
    slot = packed[:, 0]
    return jnp.clip(packed[:, 1], 0, jnp.maximum(limits_of(slots, slot) - slots.length[slot], 0))
