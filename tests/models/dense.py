"""What the tests of the models stand on: a checkpoint in memory, and attention over whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from checkpoints import LazyTensor
from jaxserve.device.state import KVPool
from jaxserve.models.decoder import Decoder, Params
from jaxserve.models.tree import make_model
from tests.models.tiny import norm_center, random_tensor

EXPECTED = Path(__file__).parents[1] / "data" / "models"


@dataclass
class FakeCheckpoint:
    """The random tensors of a tiny model, in the file's names and shapes; a test may add, drop or reshape some."""

    config: dict
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = make_model(self.config, dtype="float32", tensor_parallel=1)
        for path, parts in model.hf_names(model.config).items():
            for layer in model.copies(path):
                self.shapes |= {part.name.format(layer=layer): part.shape for part in parts}

    def names(self) -> list[str]:
        return list(self.shapes)

    def tensor(self, name: str) -> LazyTensor:
        def load(dtype: np.dtype) -> np.ndarray:
            return random_tensor(name, self.shapes[name], norm_center=norm_center(self.config)).astype(dtype)

        return LazyTensor(shape=self.shapes[name], dtype=np.dtype(np.float32), load=load)


def dense_attend(
    q: Array, k: Array, v: Array, pool: KVPool, layer: Array, *, window: Array, scale: float, softcap: float
) -> tuple[Array, KVPool]:
    """Causal attention of sequences that start at position 0 and are all there; the pool counts the layers seen."""
    rows, queries, heads, head_dim = q.shape
    grouped = q.reshape(rows, queries, k.shape[2], heads // k.shape[2], head_dim)
    highest = lax.Precision.HIGHEST
    scores = jnp.einsum("rqkgh,rskh->rkgqs", grouped, k, precision=highest, preferred_element_type=jnp.float32) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    at = jnp.arange(queries)
    distance = at[:, None] - at[None, :]
    seen = (distance >= 0) & ((window == 0) | (distance < window))
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -1e30), axis=-1).astype(v.dtype)
    out = jnp.einsum("rkgqs,rskh->rqkgh", weights, v, precision=highest, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(q.shape), pool.replace(data=pool.data + layer)


def empty_pool() -> KVPool:
    return KVPool(data=jnp.zeros((), jnp.int32))


def run(model: Decoder, params: Params, tokens: np.ndarray) -> np.ndarray:
    """Logits of whole sequences.  tokens: [R, Q] -> [R, Q, V] float32."""

    def logits(params: Params, tokens: Array) -> tuple[Array, Array]:
        positions = jnp.broadcast_to(lax.iota(jnp.int32, tokens.shape[1])[None, :], tokens.shape)
        hidden, pool = model.forward(params, tokens, positions, empty_pool(), dense_attend)
        return model.logits(params, hidden), pool.data

    out, layers = jax.jit(logits)(params, jnp.asarray(tokens))
    assert int(layers) == sum(range(model.shape.layers)), "every layer must attend once, with its own index"
    return np.asarray(out)
