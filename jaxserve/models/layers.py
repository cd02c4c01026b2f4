"""What the blocks of every family are made of.  nnx modules that hold weights and do arithmetic; no loops over layers.

Matrices are [in, out] in the model's dtype; norm weights and biases are float32 and added to float32 sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax import Array, lax

from jaxserve.device.state import KVPool
from jaxserve.models.config import ModelConfig
from jaxserve.models.rope import RopeTables, rotate
from jaxserve.quant import matmul

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Attend(Protocol):
    """Writes this step's keys and values, then attends to what the pool holds."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        pool: KVPool,
        layer: Array | np.ndarray,
        *,
        window: Array | np.ndarray,
        scale: float,
        softcap: float,
    ) -> tuple[Array, KVPool]: ...


@struct.dataclass
class LayerIndex:
    """What tells one layer from its neighbours inside the one traced block.  Numpy [L] outside of it."""

    layer: Array | np.ndarray  # [] int32
    window: Array | np.ndarray  # [] int32  0 = unlimited
    rope: Array | np.ndarray  # [] int32  index into the model's ropes


def parameter(shape: Sequence[int], axes: Sequence[str | None], dtype: str) -> nnx.Param:
    """A weight, its logical axes beside it (`jaxserve.device.sharding`).  Made under eval_shape only."""
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=tuple(axes), eager_sharding=False)


def vector(shape: Sequence[int], axes: Sequence[str | None]) -> nnx.Param:
    return parameter(shape, axes, "float32")


def wide(x: Array, rank: int) -> Array:
    """A weight [..., last] with ones in front, so that ranks agree."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x: [..., D] any float; weight: [..., D] float32, broadcast from the right -> [..., D] float32."""
    x = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * wide(weight, x.ndim)


def softcap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap); 0 = none."""
    return cap * jnp.tanh(x / cap) if cap else x


class Norm(nnx.Module):
    def __init__(self, config: ModelConfig):
        self.weight = vector((config.width,), ("embed",))
        self.eps = config.norm_eps

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D] float32."""
        return rms_norm(x, self.weight.get_value(), self.eps)


class Attention(nnx.Module):
    """Projections, norms and rotation around `attend`.

    q, k and v are one matrix whose columns are [K, G + 2, H]: each kv head's G query heads, its key, its value.  So
    splitting the columns over devices splits whole kv heads.
    """

    def __init__(self, config: ModelConfig, dtype: str):
        self.config = config
        kv, slots, head_dim = config.kv_heads_held, config.group + 2, config.head_dim
        columns = kv * slots * head_dim
        self.qkv = parameter((config.width, columns), ("embed", "heads"), dtype)
        self.qkv_bias = vector((columns,), ("heads",)) if config.has_qkv_bias else None
        self.qk_norm = vector((slots - 1, head_dim), (None, None)) if config.has_qk_norm else None
        self.out = parameter((config.heads * head_dim, config.width), ("heads", "embed"), dtype)
        self.out_bias = vector((config.width,), ("embed",)) if config.has_out_bias else None

    def __call__(
        self, x: Array, pool: KVPool, tables: RopeTables, at: LayerIndex, attend: Attend
    ) -> tuple[Array, KVPool]:
        """x: [R, Q, D], normed -> [R, Q, D] float32."""
        config = self.config
        rows, queries, _ = x.shape
        with jax.named_scope("qkv"):
            # A barrier on TPU: its compiler would shape the product as [K, G + 2, H] and for that first copy the weight.
            qkv = lax.platform_dependent(matmul(x, self.qkv), tpu=lax.optimization_barrier, default=lambda qkv: qkv)
            if self.qkv_bias is not None:
                qkv = qkv + wide(self.qkv_bias.get_value(), 3)
            qkv = qkv.reshape(rows, queries, config.kv_heads_held, config.group + 2, config.head_dim)
            qk, v = qkv[..., :-1, :], qkv[..., -1, :]
            if self.qk_norm is not None:
                qk = rms_norm(qk, self.qk_norm.get_value(), config.norm_eps)
            qk = rotate(qk, tables, at.rope).astype(self.out.get_value().dtype)
            q = qk[..., :-1, :].reshape(rows, queries, config.heads, config.head_dim)
            k, v = qk[..., -1, :], v.astype(qk.dtype)
        mixed, pool = attend(
            q, k, v, pool, at.layer,
            window=at.window, scale=config.attention_scale, softcap=config.attention_softcap,
        )  # fmt: skip
        out = matmul(mixed.reshape(rows, queries, config.heads * config.head_dim), self.out)
        return (out if self.out_bias is None else out + wide(self.out_bias.get_value(), 3)), pool


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); gate and up are one matrix [D, 2, F]."""

    def __init__(self, config: ModelConfig, dtype: str):
        self.activation = config.activation
        self.gate_up = parameter((config.width, 2, config.mlp), ("embed", None, "mlp"), dtype)
        self.gate_up_bias = vector((2, config.mlp), (None, "mlp")) if config.has_mlp_bias else None
        self.down = parameter((config.mlp, config.width), ("mlp", "embed"), dtype)
        self.down_bias = vector((config.width,), ("embed",)) if config.has_mlp_bias else None

    def __call__(self, x: Array) -> Array:
        """[R, Q, D] -> [R, Q, D] float32."""
        both = matmul(x, self.gate_up)  # [R, Q, 2, F]
        if self.gate_up_bias is not None:
            both = both + wide(self.gate_up_bias.get_value(), 4)
        out = matmul(ACTIVATIONS[self.activation](both[..., 0, :]) * both[..., 1, :], self.down)
        return out if self.down_bias is None else out + wide(self.down_bias.get_value(), 3)
