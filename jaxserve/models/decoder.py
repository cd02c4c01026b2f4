"""A decoder-only transformer as pure functions over a plain dict of weights.

`params = {"outer": {...}, "blocks": [...] or one stacked tree}`; nnx modules are merged inside the traced functions and
never leave them.  The caller gives `attend`; nothing here knows of pages, rows' lengths or sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jaxserve.device.state import KVPool, ModelShape
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import Attend, LayerIndex, Norm, parameter, softcap
from jaxserve.models.names import Parts
from jaxserve.models.rope import rope_tables
from jaxserve.quant import matmul, take_rows
from jaxserve.quant.panels import holds_panels, of_layer

DTYPES = ("float32", "bfloat16")  # of weights
Layout = Literal["list", "stacked"]
Params = dict  # nested, string keys, arrays at the leaves; "blocks" is a list of dicts or one stacked dict


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What a weight's array must look like (of one layer)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]  # logical, see jaxserve.device.sharding

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Outer(nnx.Module):
    """What stands around the blocks.

    The head is [V, D] like the embedding, tied or not: `quant.matmul` multiplies that as fast as [D, V] and a tied one
    needs no second copy.
    """

    def __init__(self, config: ModelConfig, dtype: str):
        self.embed = parameter((config.vocab, config.width), ("vocab", "embed"), dtype)
        self.norm = Norm(config)
        self.head = None if config.is_tied else parameter((config.vocab, config.width), ("vocab", "embed"), dtype)


def for_layers(
    block: Callable[[Array, KVPool, Params, LayerIndex], tuple[Array, KVPool]],
    x: Array,
    pool: KVPool,
    blocks: list | dict,
    index: LayerIndex,
) -> tuple[Array, KVPool]:
    """Run every layer.  `index` holds numpy [L] fields.

    A list of per-layer trees is a Python loop over one jitted body (traced once; a scan would copy every weight slice
    on CPU and GPU); so is a tree that holds panels, which are never sliced; another stacked tree is a scan (an unrolled
    step compiles for minutes on TPU).
    """
    if holds_panels(blocks):
        blocks = [of_layer(blocks, layer) for layer in index.layer.tolist()]
    if isinstance(blocks, list):
        body = jax.jit(block)
        for i, weights in enumerate(blocks):
            x, pool = body(x, pool, weights, jax.tree.map(lambda field, i=i: field[i], index))
        return x, pool

    def step(carry, layer):
        return block(*carry, *layer), None

    return lax.scan(step, (x, pool), (blocks, index))[0]


class Decoder:
    """One model: its numbers, its functions and the shapes of its weights.  Holds no array."""

    block: ClassVar[
        Callable[[ModelConfig, str], nnx.Module]
    ]  # of the family: block(config, dtype)(x, pool, tables, at, attend) -> (x, pool)

    def __init__(self, config: ModelConfig, dtype: str):
        self.config = config
        self.dtype = dtype
        self._outer, self._outer_state = nnx.split(nnx.eval_shape(lambda: Outer(config, dtype)))
        self._block, self._block_state = nnx.split(nnx.eval_shape(lambda: type(self).block(config, dtype)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r}, {self.dtype!r})"

    @staticmethod
    def from_hf(hf: Mapping) -> ModelConfig:
        """Raises ValueError naming what is missing or not supported."""
        raise NotImplementedError

    @staticmethod
    def hf_names(config: ModelConfig) -> dict[str, Parts]:
        """Path of every weight ("outer/embed", "blocks/mlp/down") -> the tensors of the file that fill it."""
        raise NotImplementedError

    @property
    def shape(self) -> ModelShape:
        return self.config.shape

    def first_layers(self, layers: int) -> Decoder:
        """The same model cut off after some of its layers: it takes the same outer weights and the first blocks."""
        config = replace(
            self.config, layers=layers, windows=self.config.windows[:layers],
            rope_of_layer=self.config.rope_of_layer[:layers],
        )  # fmt: skip
        return type(self)(config, self.dtype)

    def weights(self) -> dict[str, Weight]:
        """Every weight by its path, spelled as in `hf_names`."""
        found = {}
        for prefix, state in (("outer", self._outer_state), ("blocks", self._block_state)):
            for path, param in nnx.to_flat_state(state):
                value = param.get_value()
                weight = Weight(shape=value.shape, dtype=value.dtype, axes=param.get_metadata()["out_sharding"])
                found["/".join((prefix, *map(str, path)))] = weight
        return found

    def copies(self, path: str) -> range:
        """The layers a weight is there for; a single one for what stands outside of them."""
        return range(self.config.layers if path.startswith("blocks/") else 1)

    def matrices(self) -> tuple[tuple[str, int], ...]:
        """Path of every matrix that `quant.matmul` multiplies by, and which axis of it (in one layer) holds the inputs."""
        found = []
        for path, weight in self.weights().items():
            if len(weight.shape) < 2 or "embed" not in weight.axes:
                continue  # norms, biases
            if path.startswith("blocks/"):
                found.append((path, 0))
            elif path == "outer/head" or self.config.is_tied:
                found.append((path, 1))
        return tuple(found)

    def forward(
        self, params: Params, tokens: Array, positions: Array, pool: KVPool, attend: Attend
    ) -> tuple[Array, KVPool]:
        """tokens, positions: [R, Q] int32 -> hidden [R, Q, D] after the last norm, and the pool."""
        config = self.config
        outer = nnx.merge(self._outer, params["outer"])
        x = take_rows(outer.embed, tokens)
        if config.embed_scale != 1.0:
            x = x * jnp.asarray(config.embed_scale, x.dtype)
        tables = rope_tables(config.ropes, positions, config.head_dim)

        def block(x: Array, pool: KVPool, weights: Params, at: LayerIndex) -> tuple[Array, KVPool]:
            return nnx.merge(self._block, weights)(x, pool, tables, at, attend)

        index = LayerIndex(
            layer=np.arange(config.layers, dtype=np.int32),
            window=np.array(config.windows, np.int32),
            rope=np.array(config.rope_of_layer, np.int32),
        )
        x, pool = for_layers(block, x, pool, params["blocks"], index)
        return outer.norm(x).astype(x.dtype), pool

    def logits(self, params: Params, hidden: Array) -> Array:
        """hidden: [..., D] -> [..., V] float32."""
        outer = nnx.merge(self._outer, params["outer"])
        head = outer.embed if outer.head is None else outer.head
        return softcap(matmul(hidden, head, is_transposed=True), self.config.logits_softcap)
