"""Gemma 2 and Gemma 3 (text): norms before and after each half of a block, layers with and without a window."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxserve.device.state import KVPool
from jaxserve.models.config import ModelConfig, base_fields, expect, require, single_rope, windows_by_layer_types
from jaxserve.models.decoder import Decoder
from jaxserve.models.layers import Attend, Attention, GatedMLP, LayerIndex, Norm
from jaxserve.models.names import Parts, attention_parts, block_norms, mlp_parts, outer_parts
from jaxserve.models.rope import Rope, RopeTables


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: str):
        self.attention_norm = Norm(config)
        self.attention = Attention(config, dtype)
        self.attention_out_norm = Norm(config)
        self.mlp_norm = Norm(config)
        self.mlp = GatedMLP(config, dtype)
        self.mlp_out_norm = Norm(config)

    def __call__(
        self, x: Array, pool: KVPool, tables: RopeTables, at: LayerIndex, attend: Attend
    ) -> tuple[Array, KVPool]:
        mixed, pool = self.attention(self.attention_norm(x), pool, tables, at, attend)
        y = x.astype(jnp.float32) + self.attention_out_norm(mixed)
        y = y + self.mlp_out_norm(self.mlp(self.mlp_norm(y)))
        return y.astype(x.dtype), pool


class Gemma(Decoder):
    block = Block

    @staticmethod
    def from_hf(hf: Mapping) -> ModelConfig:
        fields = base_fields(hf, is_tied=True)
        require(hf, ("query_pre_attn_scalar", "head_dim"))
        expect(hf, "hidden_activation", (None, "gelu_pytorch_tanh"))
        expect(hf, "use_bidirectional_attention", (None, False))
        is_gemma2 = fields["architecture"] == "Gemma2ForCausalLM"
        if not is_gemma2:
            expect(hf, "attn_logit_softcapping", (None,))
        windows = windows_by_layer_types(hf, _layer_types(hf, period=2 if is_gemma2 else 6))
        has_bias = bool(hf.get("attention_bias", False))
        return ModelConfig(
            **fields,
            norm_offset=1.0,
            activation="gelu_tanh",
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_qk_norm=not is_gemma2,
            attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
            attention_softcap=float(hf.get("attn_logit_softcapping", 50.0 if is_gemma2 else None) or 0.0),
            logits_softcap=float(hf.get("final_logit_softcapping", 30.0 if is_gemma2 else None) or 0.0),
            embed_scale=fields["width"] ** 0.5,
            windows=windows,
            ropes=(single_rope(hf),) if is_gemma2 else _gemma3_ropes(hf),
            rope_of_layer=tuple(0 if is_gemma2 or not window else 1 for window in windows),
        )

    @staticmethod
    def hf_names(config: ModelConfig) -> dict[str, Parts]:
        norms = {
            "attention_norm": "input_layernorm",
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }
        return outer_parts(config) | block_norms(config, norms) | attention_parts(config) | mlp_parts(config)


def _layer_types(hf: Mapping, *, period: int) -> list[str]:
    """Spelled out, or: every `period`-th layer sees everything, the others have the window."""
    if hf.get("layer_types"):
        return hf["layer_types"]
    period = hf.get("sliding_window_pattern") or period
    kinds = ("full_attention", "sliding_attention")
    return [kinds[bool((i + 1) % period)] for i in range(hf["num_hidden_layers"])]


def _gemma3_ropes(hf: Mapping) -> tuple[Rope, Rope]:
    """Of layers without a window (theta 1e6, may be scaled) and with one (theta 1e4, never scaled)."""
    if hf.get("rope_parameters"):
        unknown = sorted(hf["rope_parameters"].keys() - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(
                f"rope_parameters of Gemma 3 has {', '.join(unknown)}; it holds full_attention, sliding_attention"
            )
        full = hf["rope_parameters"].get("full_attention") or {}
        local = hf["rope_parameters"].get("sliding_attention") or {}
    else:
        full, local = hf.get("rope_scaling") or {}, {}
    return (
        Rope.from_hf(full, theta=hf.get("rope_theta") or 1e6),
        Rope.from_hf(local, theta=hf.get("rope_local_base_freq") or 1e4),
    )
