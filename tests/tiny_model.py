"""A tiny random model as real files: config.json, safetensors, a trained byte-level tokenizer with a chat template.

2 layers, 32 wide, 512 tokens: everything the engine does with a real one, in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 512
CONTEXT = 768
BOS, EOS = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away from the river bank to the green hills",
    "def compute(values): return sum(value * value for value in values) / len(values)",
    "Grüße aus München, señor! 你好世界, こんにちは, привет мир 🫠👨‍👩‍👧",
] * 3

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24,
    "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
}  # fmt: skip
FAMILIES = {"llama": LLAMA, "gemma3": GEMMA3}


def write_tiny_model(folder: Path, *, family: str = "llama", seed: int = 0) -> Path:
    """-> the folder, in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        **FAMILIES[family],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, seed), folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": False, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, min_frequency=1, show_progress=False, special_tokens=["<|endoftext|>", BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    width, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", width // heads)
    kv = config["num_key_value_heads"] * head_dim
    is_gemma = config["model_type"].startswith("gemma")
    shapes = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (heads * head_dim, width),
            prefix + "self_attn.k_proj.weight": (kv, width),
            prefix + "self_attn.v_proj.weight": (kv, width),
            prefix + "self_attn.o_proj.weight": (width, heads * head_dim),
            prefix + "mlp.gate_proj.weight": (mlp, width),
            prefix + "mlp.up_proj.weight": (mlp, width),
            prefix + "mlp.down_proj.weight": (width, mlp),
            prefix + "input_layernorm.weight": (width,),
            prefix + "post_attention_layernorm.weight": (width,),
        }
        if is_gemma:
            shapes |= {
                prefix + "pre_feedforward_layernorm.weight": (width,),
                prefix + "post_feedforward_layernorm.weight": (width,),
                prefix + "self_attn.q_norm.weight": (head_dim,),
                prefix + "self_attn.k_norm.weight": (head_dim,),
            }
    weights = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape, np.float32)
        if "norm" in name:
            weights[name] = (0.0 if is_gemma else 1.0) + np.float32(0.1) * noise
        else:
            weights[name] = noise * np.float32(1.5 / shape[-1] ** 0.5)
    return weights
