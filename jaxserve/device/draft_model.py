"""A second model as a draft.  It keeps K/V of its own, in a second pool whose pages have the ids of the target's: a row's
page table serves both.

Its K/V follows the tokens that count: `propose` reads the row's past up to the newest token and writes what it is fed,
the last of its own drafts included, so that behind an accepted run nothing is missing and behind a rejected one the next
run writes over what is wrong.  `prefill` does the rest; the scheduler knows how far a row's stands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxserve.device import steps
from jaxserve.device.attention import Attend, make_attend
from jaxserve.device.sharding import abstract
from jaxserve.device.speculate import Proposed, queries_of, roll_out
from jaxserve.device.state import KVPool, ModelShape, RowFlag, SlotState
from jaxserve.device.steps import Model, Params, place


@dataclass(frozen=True, slots=True)
class SecondModel:
    """Rows without RowFlag.DRAFTED, which lack K/V here, propose nothing and touch nothing."""

    model: Model
    params: Params = field(repr=False)
    is_lookup: bool = False

    def weights(self, params: Params) -> Params:
        return self.params

    def describe(self, params: Params) -> Params:
        return jax.tree.map(abstract, self.params)

    def own_bytes(self, params: Params) -> int:
        return 0  # they lie on the device already

    def propose(
        self, params: Params, pool: KVPool, slots: SlotState, packed: Array, *, drafts: int, backend: str, mesh: Mesh
    ) -> tuple[Proposed, KVPool]:
        is_drafted = (packed[:, 3] & RowFlag.DRAFTED) > 0
        packed = packed.at[:, 1].set(jnp.where(is_drafted, packed[:, 1], 0))
        proposed, newest, pool = roll_out(
            self.model, params, pool, slots, packed, drafts=drafts, backend=backend, mesh=mesh
        )
        # The last draft is fed to nobody, but if it is accepted the next run begins behind it.
        last = jnp.max(proposed.count)
        is_left = queries_of(slots, packed) > last
        inputs = place(packed, slots.kv_len[packed[:, 0]] + last, is_left.astype(jnp.int32), 1)
        attend = make_attend(inputs, backend=backend, mesh=mesh)
        _, pool = self.model.forward(params, newest[:, None], inputs.positions, pool, attend)
        return proposed, pool

    def prefill(
        self, params: Params, pool: KVPool, slots: SlotState, packed: Array, *, queries: int, backend: str, mesh: Mesh
    ) -> KVPool:
        """A chunk of each row's tokens: `steps.prefill` for the K/V alone."""
        return steps.prefill(self.model, params, pool, slots, packed, queries=queries, backend=backend, mesh=mesh)[1]


@dataclass(frozen=True, slots=True)
class OtherWidth:
    """A model with the same tokens whose table has more or fewer rows behind the last of them than the target's."""

    model: Model
    vocab: int  # the target's V

    @property
    def shape(self) -> ModelShape:
        return replace(self.model.shape, vocab=self.vocab)

    @property
    def dtype(self) -> str:
        return self.model.dtype

    def forward(
        self, params: Params, tokens: Array, positions: Array, pool: KVPool, attend: Attend
    ) -> tuple[Array, KVPool]:
        return self.model.forward(params, jnp.minimum(tokens, self.model.shape.vocab - 1), positions, pool, attend)

    def logits(self, params: Params, hidden: Array) -> Array:
        logits = self.model.logits(params, hidden)[..., : self.vocab]
        missing = self.vocab - logits.shape[-1]
        return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
