"""Rotary position embedding: its settings in a config.json, its frequencies, its tables, its use.

The tables are float32 and made once per step, outside the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """One set of rotary frequencies.  Raises ValueError for a scaling that is not one of default, linear, llama3."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3

    @staticmethod
    def from_hf(settings: Mapping, *, theta: float) -> Rope:
        """From `rope_scaling` (which has no theta) or one entry of `rope_parameters` (which may have it)."""
        kind = settings.get("rope_type", settings.get("type", "default"))
        theta = float(settings.get("rope_theta", theta))
        partial = settings.get("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise ValueError(f"partial_rotary_factor={partial} is not supported, only 1.0 (all of the head is rotated)")
        if kind == "default":
            return Rope(theta=theta)
        wanted = {
            "linear": {"factor": "factor"},
            "llama3": {
                "factor": "factor",
                "low_freq_factor": "low_freq_factor",
                "high_freq_factor": "high_freq_factor",
                "original_max_position": "original_max_position_embeddings",
            },
        }.get(kind)
        if wanted is None:
            raise ValueError(f"rope scaling of type {kind!r} is not supported; supported: default, linear, llama3")
        missing = [name for name in wanted.values() if name not in settings]
        if missing:
            raise ValueError(f"rope scaling of type {kind!r} lacks {', '.join(missing)}")
        return Rope(theta=theta, kind=kind, **{field: settings[name] for field, name in wanted.items()})

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position.  [H/2] float32."""
        freq = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.kind == "linear":
            freq = freq / self.factor
        if self.kind == "llama3":
            # Long waves are slowed by `factor`, short ones kept, those between interpolated (Llama 3.1's model card).
            turns = self.original_max_position * freq / (2 * math.pi)
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            keep = np.clip(keep, 0, 1)
            freq = (1 - keep) * freq / self.factor + keep * freq
        return freq.astype(np.float32)


@struct.dataclass
class RopeTables:
    """cos and signed sin of this step's positions, for each of the model's Ropes.  [ropes, R, Q, 1, 1, 2, H/2]."""

    cos: Array
    sin: Array


def rope_tables(ropes: Sequence[Rope], positions: Array, head_dim: int) -> RopeTables:
    """positions: [R, Q] int32."""
    freq = np.stack([rope.frequencies(head_dim) for rope in ropes])
    angle = positions.astype(jnp.float32)[None, :, :, None] * freq[:, None, None, :]  # [ropes, R, Q, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    shape = (len(ropes), *positions.shape, 1, 1, 2, head_dim // 2)
    return RopeTables(cos=jnp.stack([cos, cos], -2).reshape(shape), sin=jnp.stack([-sin, sin], -2).reshape(shape))


def rotate(x: Array, tables: RopeTables, which: Array | np.ndarray) -> Array:
    """Rotate pairs (i, i + H/2) of every head by its position's angles.  x: [R, Q, heads, n, H] float32 -> same.

    `which`: the layer's Rope, a traced scalar when the model has several.
    """
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    pick = 0 if tables.cos.shape[0] == 1 else which
    return (halves * tables.cos[pick] + halves[..., ::-1, :] * tables.sin[pick]).reshape(x.shape)
