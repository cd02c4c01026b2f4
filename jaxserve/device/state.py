"""Every array the device keeps or is handed, with its shape.  Plain pytrees; what is done with them stands elsewhere.

Letters, here and in every file of the device half:
  S slots   R rows of this step   Q queries per row   P pages per row   T tokens per page   L layers   D width
  N query heads   K kv heads   H head dim   F mlp width   V vocabulary   E stop ids   B biases   A allowed ids"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax.numpy as jnp
from flax import struct
from jax import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a model that the engine needs."""

    layers: int  # L
    width: int  # D
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    vocab: int  # V
    max_position: int  # the model's context


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """The widths of the slot state: the engine's limits."""

    slots: int  # S; slot S is scrap
    max_len: int
    vocab: int  # V
    stop_ids: int  # E
    biases: int  # B
    allowed_ids: int  # A


@struct.dataclass
class KVPool:
    """Keys and values of every layer's pages.  Layer l's page p is row l * NP + p; page 0 of every layer is scrap."""

    data: Array  # [L * NP, 2, K, T, H']  H' = H or more, zeros past H
    scale: Array | None = None  # [L * NP, 2, K, T] for 8-bit pools
    pages: int = struct.field(pytree_node=False, default=0)  # NP

    @staticmethod
    def zeros(shape: ModelShape, *, pages: int, page_size: int, head_dim: int, dtype) -> KVPool:
        """head_dim: H', of `jaxserve.device.attention.pool_head_dim`; dtype: of 8 bits, the pool has scales."""
        data = jnp.zeros((shape.layers * pages, 2, shape.kv_heads, page_size, head_dim), dtype)
        is_narrow = data.dtype.itemsize == 1
        return KVPool(data=data, scale=jnp.zeros(data.shape[:-1], jnp.float32) if is_narrow else None, pages=pages)


@struct.dataclass
class SlotState:
    """What the device knows of the sequences it serves.  Slot S is scrap: padding rows and rows that take no token
    name it.

    Few arrays, because the host pays for each of them at every call: what only a load changes is one."""

    tokens: Array  # [S+1, max_len] int32  prompt and output
    length: Array  # [S+1] int32  tokens known
    kv_len: Array  # [S+1] int32  positions whose K/V are written
    counts: Array  # [S+1, V] int32  times generated, plus SEEN_IN_PROMPT when the prompt holds it
    rules: Array  # [S+1, W] int32  `Rules`, packed by `jaxserve.device.slots`
    shape: SlotShape = struct.field(pytree_node=False)


@struct.dataclass
class Rules:
    """What a sequence asks of its sampler.  Any leading axes; shown here of one sequence."""

    limit: Array  # int32  a row that holds this many tokens is inert
    min_len: Array  # int32  stop ids are masked while length < min_len
    seed: Array  # [2] uint32
    top_k: Array  # int32  0 = off
    temperature: Array  # float32  0 = greedy
    top_p: Array  # float32  1 = off
    min_p: Array  # float32  0 = off
    presence: Array  # float32  0 = off
    frequency: Array  # float32  0 = off
    repetition: Array  # float32  1 = off
    stop_ids: Array  # [E] int32  -1 = none
    bias_ids: Array  # [B] int32  -1 = none
    bias_values: Array  # [B] float32  -inf bans
    allowed_ids: Array  # [A] int32  -1 = none; all -1 = every id allowed


@struct.dataclass
class RowState:
    """The part of the slot state that a draw reads, of the rows of one call."""

    length: Array  # [R] int32
    counts: Array  # [R, V] int32
    rules: Rules  # every field [R, ...]


SEEN_IN_PROMPT = 1 << 24  # in SlotState.counts


class RowFlag(enum.IntFlag):
    """What a row needs of the sampler; a part of it runs only when some row of the call needs it."""

    TAKES_TOKEN = 1
    PENALTIES = 2
    BIAS = 4  # logit_bias and banned ids
    ALLOWED = 8  # allowed ids
    MIN_TOKENS = 16  # stop ids are masked until min_len
    MASK = 32  # a late mask
    SAMPLED = 64  # temperature > 0
    TRUNCATED = 128  # top-k, top-p or min-p
    LOGPROBS = 256
    DRAFTED = 512  # verify: a draft with K/V of its own holds all of the row's past


@struct.dataclass
class StepInputs:
    """Where one call's rows stand, for attention.  Padding rows have q_len 0."""

    q_len: Array  # [R] int32  queries that count; 0 = inert
    page_table: Array  # [R, P] int32  page 0 = scrap
    kv_len: Array  # [R] int32  positions in the pool once this step has written its own; 0 = inert
    positions: Array  # [R, Q] int32  query i stands at kv_len - q_len + i; padded queries hold 0
