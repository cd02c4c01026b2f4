"""Tiny models of every family: their config.json and their weights, made from names alone.

The script that asked Hugging Face transformers for the right answers (`tests/data/models/make_expected.py`) uses this
file too, so that only the answers are stored.  numpy only."""

from __future__ import annotations

import zlib

import numpy as np

VOCAB, WIDTH, LENGTH, LAYERS = 160, 32, 40, 2
TOKENS = np.random.default_rng(7).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)  # two sequences


def _config(architecture: str, model_type: str, **own) -> dict:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **own,
    }


_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "tie_word_embeddings": True}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# As their authors wrote them: the spelling of transformers 4.
CONFIGS: dict[str, dict] = {
    "llama2": _config("LlamaForCausalLM", "llama", num_key_value_heads=4, rope_theta=10000.0),
    "llama31": _config("LlamaForCausalLM", "llama", rope_theta=500.0, rope_scaling=_LLAMA3),
    "llama_linear_biases": _config(
        "LlamaForCausalLM", "llama", attention_bias=True, mlp_bias=True, rope_scaling={"type": "linear", "factor": 3.0}
    ),
    "smollm2": _config(
        "LlamaForCausalLM", "llama", num_attention_heads=8, num_key_value_heads=4, rope_theta=1e5,
        tie_word_embeddings=True,
    ),
    "mistral": _config("MistralForCausalLM", "mistral", sliding_window=8, rope_theta=10000.0),
    "qwen2": _config(
        "Qwen2ForCausalLM", "qwen2", rope_theta=1e6, tie_word_embeddings=True,
        use_sliding_window=True, sliding_window=8, max_window_layers=1,
    ),
    "qwen3": _config("Qwen3ForCausalLM", "qwen3", rope_theta=1e6, head_dim=16),
    "gemma2": _config(
        "Gemma2ForCausalLM", "gemma2", **_GEMMA, hidden_activation="gelu_pytorch_tanh", rope_theta=10000.0,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
    ),
    "gemma3": _config(
        "Gemma3ForCausalLM", "gemma3_text", **_GEMMA, hidden_activation="gelu_pytorch_tanh", sliding_window_pattern=2,
        rope_theta=1e6, rope_local_base_freq=10000.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
}  # fmt: skip


def random_tensor(name: str, shape: tuple[int, ...], *, norm_center: float = 1.0) -> np.ndarray:
    """The tensor of this name.  `norm_center`: 0 for Gemma, which stores its norms' weights minus one."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if "norm" in name:
        return np.float32(norm_center) + np.float32(0.2) * noise
    if len(shape) == 1 or "embed" in name:
        return np.float32(0.5) * noise
    return noise * np.float32(1.5 / shape[1] ** 0.5)


def norm_center(config: dict) -> float:
    return 0.0 if config["model_type"].startswith("gemma") else 1.0
