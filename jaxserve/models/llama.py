"""Llama 2, 3 and 3.1, SmolLM2, Mistral, Qwen2 and Qwen3: one block, four spellings of config.json."""

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
from jaxserve.models.rope import RopeTables


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: str):
        self.attention_norm = Norm(config)
        self.attention = Attention(config, dtype)
        self.mlp_norm = Norm(config)
        self.mlp = GatedMLP(config, dtype)

    def __call__(
        self, x: Array, pool: KVPool, tables: RopeTables, at: LayerIndex, attend: Attend
    ) -> tuple[Array, KVPool]:
        mixed, pool = self.attention(self.attention_norm(x), pool, tables, at, attend)
        y = x.astype(jnp.float32) + mixed
        y = y + self.mlp(self.mlp_norm(y))
        return y.astype(x.dtype), pool


class Llama(Decoder):
    block = Block

    @staticmethod
    def from_hf(hf: Mapping) -> ModelConfig:
        fields = base_fields(hf, is_tied=False)
        name = fields["architecture"]
        expect(hf, "hidden_act", ("silu",))
        windows = (0,) * fields["layers"]
        if name == "LlamaForCausalLM":
            bias = bool(hf.get("attention_bias", False))
            expect(hf, "layer_types", (None, ["full_attention"] * fields["layers"]))
            own: dict = {"has_qkv_bias": bias, "has_out_bias": bias, "has_mlp_bias": bool(hf.get("mlp_bias", False))}
        elif name == "MistralForCausalLM":
            expect(hf, "attention_bias", (None, False))
            windows = (hf.get("sliding_window") or 0,) * fields["layers"]
            if hf.get("layer_types"):
                windows = windows_by_layer_types(hf, hf["layer_types"])
            own = {}
        elif name == "Qwen2ForCausalLM":
            windows = _qwen_windows(hf, fields["layers"])
            own = {"has_qkv_bias": True}
        else:
            require(hf, ("head_dim",))
            windows = _qwen_windows(hf, fields["layers"])
            bias = bool(hf.get("attention_bias", False))
            own = {"has_qk_norm": True, "has_qkv_bias": bias, "has_out_bias": bias}
        return ModelConfig(
            **fields, **own, windows=windows, attention_scale=fields["head_dim"] ** -0.5,
            ropes=(single_rope(hf),), rope_of_layer=(0,) * fields["layers"],
        )  # fmt: skip

    @staticmethod
    def hf_names(config: ModelConfig) -> dict[str, Parts]:
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        return outer_parts(config) | block_norms(config, norms) | attention_parts(config) | mlp_parts(config)


def _qwen_windows(hf: Mapping, layers: int) -> tuple[int, ...]:
    """Layers from `max_window_layers` on have the window, if windows are used at all."""
    if not hf.get("use_sliding_window"):
        return (0,) * layers
    require(hf, ("sliding_window",))
    if hf.get("layer_types"):
        return windows_by_layer_types(hf, hf["layer_types"])
    require(hf, ("max_window_layers",))
    return tuple(hf["sliding_window"] if i >= hf["max_window_layers"] else 0 for i in range(layers))
