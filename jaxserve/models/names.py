"""Which tensors of a Hugging Face checkpoint fill which weight, and where in it they go.

A weight's Parts are written one after the other into one host array of the target dtype, so that no fused float32 copy
ever exists.  `{layer}` in a name is the layer's number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the file: its name, its shape there, and how it is written into the weight."""

    name: str
    shape: tuple[int, ...]
    put: Callable[[np.ndarray, np.ndarray], None]  # (weight, tensor)


Parts = tuple[Part, ...]


def _copy(weight: np.ndarray, tensor: np.ndarray) -> None:
    weight[...] = tensor


def _transpose(weight: np.ndarray, tensor: np.ndarray) -> None:
    weight[...] = tensor.T


def outer_parts(config: ModelConfig) -> dict[str, Parts]:
    """Embedding, last norm, head."""
    table = (config.vocab, config.width)
    parts = {
        "outer/embed": (Part("model.embed_tokens.weight", table, _copy),),
        "outer/norm/weight": (norm_part("model.norm.weight", config),),
    }
    if not config.is_tied:
        parts["outer/head"] = (Part("lm_head.weight", table, _copy),)
    return parts


def norm_part(name: str, config: ModelConfig) -> Part:
    def put(weight: np.ndarray, tensor: np.ndarray) -> None:
        weight[...] = tensor.astype(np.float32) + np.float32(config.norm_offset)

    return Part(name, (config.width,), put)


def block_norms(config: ModelConfig, names: dict[str, str]) -> dict[str, Parts]:
    """names: attribute of the block -> name in the file."""
    return {
        f"blocks/{ours}/weight": (norm_part(f"model.layers.{{layer}}.{theirs}.weight", config),)
        for ours, theirs in names.items()
    }


def attention_parts(config: ModelConfig) -> dict[str, Parts]:
    group, held, head_dim = config.group, config.kv_heads_held, config.head_dim
    prefix = "model.layers.{layer}.self_attn"

    def columns(first: int, last: int) -> Callable[[np.ndarray, np.ndarray], None]:
        """Into slots [first, last) of every kv head's [G + 2, H] columns; a repeated kv head is written repeatedly."""

        def put(weight: np.ndarray, tensor: np.ndarray) -> None:
            heads = tensor.T.reshape(
                *tensor.shape[1:], -1, 1, last - first, head_dim
            )  # [D, held or K, 1, n, H], a view
            split = (heads.shape[-4], held // heads.shape[-4])
            weight.reshape(*weight.shape[:-1], *split, group + 2, head_dim)[..., first:last, :] = heads

        return put

    def one_per_head(first: int, last: int) -> Callable[[np.ndarray, np.ndarray], None]:
        def put(weight: np.ndarray, tensor: np.ndarray) -> None:
            weight[first:last] = tensor.astype(np.float32)[None] + np.float32(config.norm_offset)

        return put

    slots = (
        ("q_proj", config.heads, 0, group),
        ("k_proj", config.kv_heads, group, group + 1),
        ("v_proj", config.kv_heads, group + 1, group + 2),
    )
    parts: dict[str, Parts] = {
        "blocks/attention/qkv": tuple(
            Part(f"{prefix}.{name}.weight", (heads * head_dim, config.width), columns(first, last))
            for name, heads, first, last in slots
        ),
        "blocks/attention/out": (Part(f"{prefix}.o_proj.weight", (config.width, config.heads * head_dim), _transpose),),
    }
    if config.has_qkv_bias:
        parts["blocks/attention/qkv_bias"] = tuple(
            Part(f"{prefix}.{name}.bias", (heads * head_dim,), columns(first, last))
            for name, heads, first, last in slots
        )
    if config.has_out_bias:
        parts["blocks/attention/out_bias"] = (Part(f"{prefix}.o_proj.bias", (config.width,), _copy),)
    if config.has_qk_norm:
        parts["blocks/attention/qk_norm"] = (
            Part(f"{prefix}.q_norm.weight", (head_dim,), one_per_head(0, group)),
            Part(f"{prefix}.k_norm.weight", (head_dim,), one_per_head(group, group + 1)),
        )
    return parts


def mlp_parts(config: ModelConfig) -> dict[str, Parts]:
    prefix = "model.layers.{layer}.mlp"

    def half(which: int) -> Callable[[np.ndarray, np.ndarray], None]:
        def put(weight: np.ndarray, tensor: np.ndarray) -> None:
            weight[..., which, :] = tensor.T

        return put

    matrix = (config.mlp, config.width)
    halves = (("gate_proj", 0), ("up_proj", 1))
    parts: dict[str, Parts] = {
        "blocks/mlp/gate_up": tuple(Part(f"{prefix}.{name}.weight", matrix, half(i)) for name, i in halves),
        "blocks/mlp/down": (Part(f"{prefix}.down_proj.weight", matrix[::-1], _transpose),),
    }
    if config.has_mlp_bias:
        parts["blocks/mlp/gate_up_bias"] = tuple(
            Part(f"{prefix}.{name}.bias", matrix[:1], half(i)) for name, i in halves
        )
        parts["blocks/mlp/down_bias"] = (Part(f"{prefix}.down_proj.bias", matrix[1:], _copy),)
    return parts
