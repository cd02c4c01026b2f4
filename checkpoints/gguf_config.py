"""A GGUF's metadata -> the config.json that Hugging Face transformers would have for the same model.

One function an architecture, in ARCHITECTURES.  Reads no tensor but Llama 3's small table of rope factors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from checkpoints.gguf_file import GGUFFile


def hf_config(gguf: GGUFFile) -> dict:
    """config.json's content.  Raises ValueError naming the file and the key at fault."""
    meta = Metadata(gguf)
    if meta.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"{gguf.path}: the architecture {meta.architecture!r} is not supported (known: {known})")
    if gguf.metadata.get("split.count", 1) != 1:
        raise ValueError(f"{gguf.path} is one part of a split GGUF: merge the parts into one file first")
    if meta.int("expert_count", 0):
        raise ValueError(f"{gguf.path}: mixtures of experts are not supported in GGUF files")
    return ARCHITECTURES[meta.architecture](meta)


class Metadata:
    """Typed reads of one architecture's keys."""

    def __init__(self, gguf: GGUFFile):
        self.gguf = gguf
        self.architecture = str(gguf.metadata.get("general.architecture", ""))

    def int(self, key: str, default: int | None = None) -> int:
        """A count.  Some writers give one value for each layer: they must agree."""
        name = f"{self.architecture}.{key}"
        value = self.gguf.metadata.get(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ValueError(f"{self.gguf.path}: metadata {name!r} must be a count, got {value!r}")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        name = f"{self.architecture}.{key}"
        value = self.gguf.metadata.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.gguf.path}: metadata {name!r} must be a number, got {value!r}")
        return _shortest(value)

    def text(self, key: str, default: str) -> str:
        return str(self.gguf.metadata.get(f"{self.architecture}.{key}", default))

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.gguf.metadata

    def has_tensor(self, name: str) -> bool:
        return name in self.gguf.tensors


def _shortest(value: float) -> float:
    """The number its author wrote: metadata is float32, so 1e-5 comes out as 9.999999747378752e-06."""
    return float(str(np.float32(value))) if float(np.float32(value)) == value else float(value)


def _common(meta: Metadata, model_type: str, architecture: str) -> dict:
    embedding = meta.gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{meta.gguf.path} has no tensor 'token_embd.weight': not a language model's file")
    heads, width = meta.int("attention.head_count"), meta.int("embedding_length")
    if not heads or not width:
        raise ValueError(f"{meta.gguf.path}: {heads} heads and a width of {width} make no model")
    head_dim = meta.int("attention.key_length", meta.int("rope.dimension_count", width // heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if meta.int(key, head_dim) != head_dim:
            raise ValueError(
                f"{meta.gguf.path}: {key}={meta.int(key)} differs from the head size {head_dim}: unsupported"
            )
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": meta.int("feed_forward_length"),
        "num_hidden_layers": meta.int("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.int("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.int("context_length"),
        "rms_norm_eps": meta.float("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.float("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta, head_dim),
        "tie_word_embeddings": not meta.has_tensor("output.weight"),
        "torch_dtype": "float32",
    }
    for name in ("bos", "eos"):
        token_id = meta.gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int):
            config[f"{name}_token_id"] = token_id
    return config


def _llama(meta: Metadata) -> dict:
    """Llama, SmolLM2 and, as llama.cpp has no architecture of its own for it, Mistral."""
    if meta.int("attention.sliding_window", 0):
        config = _common(meta, "mistral", "MistralForCausalLM")
        config["sliding_window"] = meta.int("attention.sliding_window")
    else:
        config = _common(meta, "llama", "LlamaForCausalLM")
        config["attention_bias"] = meta.has_tensor("blk.0.attn_q.bias")
        config["mlp_bias"] = meta.has_tensor("blk.0.ffn_up.bias")
    return config | {"hidden_act": "silu"}


def _qwen2(meta: Metadata) -> dict:
    return _common(meta, "qwen2", "Qwen2ForCausalLM") | {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(meta: Metadata) -> dict:
    config = _common(meta, "qwen3", "Qwen3ForCausalLM") | {"hidden_act": "silu", "use_sliding_window": False}
    return config | {"attention_bias": meta.has_tensor("blk.0.attn_q.bias")}


def _gemma2(meta: Metadata) -> dict:
    config = _common(meta, "gemma2", "Gemma2ForCausalLM")
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.int("attention.sliding_window", 4096),
        "layer_types": _layer_types(config["num_hidden_layers"], period=2),
        "attn_logit_softcapping": meta.float("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.float("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=46),
    }


def _gemma3(meta: Metadata) -> dict:
    config = _common(meta, "gemma3_text", "Gemma3ForCausalLM")
    cap = meta.float("final_logit_softcapping", 0.0)
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.int("attention.sliding_window"),
        "layer_types": _layer_types(config["num_hidden_layers"], period=6),
        "rope_theta": meta.float("rope.freq_base", 1e6),
        "rope_local_base_freq": meta.float("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": cap or None,
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=62),
    }


def _layer_types(layers: int, *, period: int) -> list[str]:
    """Every `period`-th layer sees everything, the others a window."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def _query_scalar(config: dict, *, layers_of_27b: int) -> int:
    """GGUF has no key for it.  The 27B models divide by width / heads, all others by the head size: llama.cpp knows
    them by their number of layers, and so do we."""
    if config["num_hidden_layers"] == layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _rope_scaling(meta: Metadata, head_dim: int) -> dict | None:
    if meta.has_tensor("rope_freqs.weight"):
        factors = meta.gguf.rows("rope_freqs.weight").view(np.float32).ravel()
        return _llama3_scaling(meta, factors, head_dim)
    kind = meta.text("rope.scaling.type", "linear" if meta.has("rope.scale_linear") else "none")
    if kind == "none":
        return None
    factor = meta.float("rope.scaling.factor", meta.float("rope.scale_linear", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = meta.int("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ValueError(
        f"{meta.gguf.path}: the rope scaling {kind!r} is not supported (none, linear, yarn and llama3 are)"
    )


def _llama3_scaling(meta: Metadata, factors: np.ndarray, head_dim: int) -> dict:
    """Llama 3.1's parameters from the table of divisors that llama.cpp keeps in their place.

    With u = original / low and v = original / high (wavelengths), a divisor is 1 below v, `factor` above u, and between
    them 1 / ((1 - s) / factor + s) with s = (original / wavelength - low) / (high - low).  The table depends on u and
    v alone, so any scale of (original, low, high) is the same scaling; low = 1 is the published form."""
    base = meta.float("rope.freq_base", 10000.0)
    factor = _shortest(float(factors.max(initial=1.0)))
    candidates = [(8192, 4.0)]
    inverse_wavelength = base ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    if factors.shape == inverse_wavelength.shape:
        between = (factors > 1.0001) & (factors < factor * 0.9999)
        if between.sum() >= 2:
            smooth = (1 / factors[between].astype(float) - 1 / factor) / (1 - 1 / factor)
            slope, constant = np.polyfit(inverse_wavelength[between], smooth, 1)
            candidates.append((round(-slope / constant), round(1 - 1 / constant, 3)))
        for original, high in candidates:
            found = _llama3_factors(inverse_wavelength, factor=factor, high=high, original=original)
            if np.allclose(found, factors, rtol=2e-5, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    raise ValueError(f"{meta.gguf.path}: the tensor 'rope_freqs.weight' holds no scaling of Llama 3's kind")


def _llama3_factors(inverse_wavelength: np.ndarray, *, factor: float, high: float, original: int) -> np.ndarray:
    turns = original * inverse_wavelength  # full turns within the original context
    smooth = np.clip((turns - 1.0) / (high - 1.0), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


# GGUF architecture -> its config.json
ARCHITECTURES: dict[str, Callable[[Metadata], dict]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
