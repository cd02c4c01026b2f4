"""What a model is: numbers from its config.json, checked.  Plain data; no arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxserve.device.sharding import kv_heads_per_mesh
from jaxserve.device.state import ModelShape
from jaxserve.models.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, as the layers need it.  Letters as in `jaxserve.device.state`."""

    architecture: str
    layers: int  # L
    width: int  # D
    heads: int  # N
    kv_heads: int  # K, of the file
    kv_repeat: int = 1  # each kv head is kept this often, so that every device of a wide mesh has one
    head_dim: int  # H
    mlp: int  # F
    vocab: int  # V
    max_position: int
    norm_eps: float
    norm_offset: float = 0.0  # added to the file's norm weights (Gemma keeps w - 1)
    is_tied: bool  # the head is the embedding
    activation: str = "silu"
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    attention_scale: float
    attention_softcap: float = 0.0  # 0 = none
    logits_softcap: float = 0.0  # 0 = none
    embed_scale: float = 1.0
    windows: tuple[int, ...]  # of each layer; 0 = unlimited
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]  # index into ropes

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp", "vocab", "max_position"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} of the model must be a positive integer")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even (rotary pairs)")
        if len(self.windows) != self.layers or len(self.rope_of_layer) != self.layers:
            raise ValueError(f"layer types are given for {len(self.windows)} layers, the model has {self.layers}")

    @property
    def kv_heads_held(self) -> int:
        """K of the weights and of the KV pool."""
        return self.kv_heads * self.kv_repeat

    @property
    def group(self) -> int:
        """G: query heads to one kv head."""
        return self.heads // self.kv_heads_held

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            layers=self.layers, width=self.width, heads=self.heads, kv_heads=self.kv_heads_held,
            head_dim=self.head_dim, vocab=self.vocab, max_position=self.max_position,
        )  # fmt: skip

    def on_mesh(self, tensor_parallel: int) -> ModelConfig:
        """The same model split over this many devices.  Raises ValueError with the numbers when it cannot be."""
        if self.mlp % tensor_parallel:
            raise ValueError(f"mlp width F={self.mlp} does not divide by tensor_parallel={tensor_parallel}")
        held = kv_heads_per_mesh(heads=self.heads, kv_heads=self.kv_heads, tensor_parallel=tensor_parallel)
        return replace(self, kv_repeat=held // self.kv_heads)


def require(hf: Mapping, names: Sequence[str]) -> None:
    """Raises ValueError naming everything that a config.json lacks."""
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")


def expect(hf: Mapping, name: str, allowed: Sequence[object]) -> None:
    """Raises ValueError when a setting is there with a value that this engine does not implement."""
    if name in hf and hf[name] not in allowed:
        raise ValueError(f"{name}={hf[name]!r} is not supported; supported: {', '.join(map(repr, allowed))}")


def base_fields(hf: Mapping, *, is_tied: bool) -> dict:
    """The fields that every family spells alike.  `is_tied`: what the family means when the file does not say."""
    require(hf, ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
                 "max_position_embeddings", "rms_norm_eps"))  # fmt: skip
    expect(hf, "quantization_config", (None,))
    expect(hf, "partial_rotary_factor", (None, 1, 1.0))
    if hf["hidden_size"] % hf["num_attention_heads"] and not hf.get("head_dim"):
        raise ValueError(f"hidden_size={hf['hidden_size']} does not divide by {hf['num_attention_heads']} heads")
    return {
        "architecture": hf["architectures"][0],
        "layers": hf["num_hidden_layers"],
        "width": hf["hidden_size"],
        "heads": hf["num_attention_heads"],
        "kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "mlp": hf["intermediate_size"],
        "vocab": hf["vocab_size"],
        "max_position": hf["max_position_embeddings"],
        "norm_eps": hf["rms_norm_eps"],
        "is_tied": hf.get("tie_word_embeddings", is_tied),
    }


def windows_by_layer_types(hf: Mapping, layer_types: Sequence[str]) -> tuple[int, ...]:
    """The window of each layer.  Raises ValueError for kinds of attention this engine does not have."""
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"layer_types has {', '.join(map(repr, unknown))}; supported: full_attention, sliding_attention"
        )
    if "sliding_attention" in layer_types:
        require(hf, ("sliding_window",))
    return tuple(hf["sliding_window"] if kind == "sliding_attention" else 0 for kind in layer_types)


def single_rope(hf: Mapping) -> Rope:
    """The one Rope of a model, in the old spelling (rope_theta, rope_scaling) or the new (rope_parameters)."""
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return Rope.from_hf(settings, theta=hf.get("rope_theta") or 10000.0)
