"""Drafts from the target's own weights, all of them, in few bits (`jaxserve.quant`).  No second checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array
from jax.sharding import Mesh

from jaxserve.device.sharding import abstract, local_bytes
from jaxserve.device.speculate import Proposed, roll_out
from jaxserve.device.state import KVPool, SlotState
from jaxserve.device.steps import Model, Params
from jaxserve.quant.panels import holds_panels, of_layer
from jaxserve.quant.qtensor import QTensor, quantise


@dataclass(frozen=True, slots=True)
class QuantisedSelf:
    """The whole model with quantised matrices.  It reads and writes the target's pool, as `FirstLayers` does: exact
    K/V of the past, approximate ones at the drafts' positions until the verify call writes them again."""

    model: Model
    bits: int  # 8 or 4
    matrices: tuple[tuple[str, int], ...]  # path of each ("blocks/mlp/down"), and which axis its inputs are
    is_lookup: bool = False

    def weights(self, params: Params) -> Params:
        made = {"outer": dict(params["outer"]), "blocks": params["blocks"]}
        if holds_panels(made["blocks"]):
            made["blocks"] = [of_layer(made["blocks"], layer) for layer in range(self.model.shape.layers)]
        for path, axis in self.matrices:
            top, *keys = path.split("/")
            blocks = made[top]
            if isinstance(blocks, list):
                made[top] = [self._put(block, keys, axis) for block in blocks]
            else:
                made[top] = self._put(blocks, keys, axis + (top == "blocks"))  # stacked: the layers come first
        return made

    def describe(self, params: Params) -> Params:
        return jax.tree.map(abstract, self.weights(jax.tree.map(abstract, params)))

    def own_bytes(self, params: Params) -> int:
        leaves = jax.tree.leaves(self.describe(params), is_leaf=lambda leaf: isinstance(leaf, QTensor))
        return local_bytes([leaf for leaf in leaves if isinstance(leaf, QTensor)])

    def propose(
        self, params: Params, pool: KVPool, slots: SlotState, packed: Array, *, drafts: int, backend: str, mesh: Mesh
    ) -> tuple[Proposed, KVPool]:
        proposed, _, pool = roll_out(self.model, params, pool, slots, packed, drafts=drafts, backend=backend, mesh=mesh)
        return proposed, pool

    def _put(self, node: Params, keys: list[str], axis: int) -> Params:
        """The same tree with one leaf quantised; what is not on the way to it is shared."""
        key, *rest = keys
        leaf = self._put(node[key], rest, axis) if rest else quantise(node[key], self.bits, input_axis=axis)
        return {**node, key: leaf}
