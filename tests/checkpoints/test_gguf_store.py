"""A GGUF file is the Hugging Face checkpoint it was made from: names, values and config, for every architecture."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.quants import dequantize

from checkpoints import Checkpoint, ModelFiles, open_checkpoint
from checkpoints.gguf_store import GGUFStore
from tests.text.files import real_model, write_gguf

HEADS, KV_HEADS, HEAD_DIM, WIDTH, MLP, VOCAB, LAYERS = 4, 2, 8, 16, 24, 40, 2
DICE = np.random.default_rng(0)


def metadata(architecture: str, **more) -> dict[str, object]:
    keys = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
    }
    keys |= more
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}


def hf_weights(*, gemma: bool = False, qk_norm: bool = False, biases: bool = False, tied: bool = True) -> dict:
    """Random weights under Hugging Face's names."""

    def random(*shape: int) -> np.ndarray:
        return DICE.standard_normal(shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": random(VOCAB, WIDTH), "model.norm.weight": random(WIDTH)}
    if not tied:
        weights["lm_head.weight"] = random(VOCAB, WIDTH)
    for layer in range(LAYERS):
        block = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            block[f"self_attn.{part}_proj"] = (heads * HEAD_DIM, WIDTH)
        block |= {"self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM), "mlp.down_proj": (WIDTH, MLP)}
        block |= {"mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH)}
        if gemma:
            block |= {"pre_feedforward_layernorm": (WIDTH,), "post_feedforward_layernorm": (WIDTH,)}
        if qk_norm:
            block |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
        weights |= {f"model.layers.{layer}.{name}.weight": random(*shape) for name, shape in block.items()}
        if biases:
            for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                weights[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = random(heads * HEAD_DIM)
    return weights


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter's, word for word: LlamaModel.permute in convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def as_llama_cpp(architecture: str, weights: dict) -> dict[str, np.ndarray]:
    """What llama.cpp's converter would write, with its own table of names."""
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], LAYERS)
    tensors = {}
    for name, values in weights.items():
        if architecture == "llama" and ".q_proj." in name:
            values = permute(values, HEADS)
        if architecture == "llama" and ".k_proj." in name:
            values = permute(values, KV_HEADS)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


FAMILIES = {
    "llama": {"biases": True, "tied": False},
    "qwen2": {"biases": True},
    "qwen3": {"qk_norm": True, "tied": False},
    "gemma2": {"gemma": True},
    "gemma3": {"gemma": True, "qk_norm": True},
}


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles("tiny", "gguf", path))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_names_and_values_are_hugging_faces(tmp_path: Path, architecture: str):
    weights = hf_weights(**FAMILIES[architecture])
    more = {"attention.sliding_window": 64} if architecture.startswith("gemma") else {}
    tensors = as_llama_cpp(architecture, weights)
    assert len(tensors) == len(weights)
    checkpoint = opened(write_gguf(tmp_path / "a.gguf", metadata(architecture, **more), tensors))
    assert sorted(checkpoint.names()) == sorted(weights)
    for name, expected in weights.items():
        tensor = checkpoint.tensor(name)
        assert (tensor.shape, tensor.dtype) == (expected.shape, np.float32)
        # 1 + w is rounded in the file: the last bits of a small w are lost there, not here.
        np.testing.assert_allclose(tensor.read(), expected, rtol=0, atol=2e-7)
        np.testing.assert_array_equal(
            tensor.read(np.dtype(ml_dtypes.bfloat16)), tensor.read().astype(ml_dtypes.bfloat16), strict=True
        )


def tensor_types() -> list[gguf.GGMLQuantizationType]:
    """Those the gguf package dequantises."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        size = gguf.GGML_QUANT_SIZES[kind][1]
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", tensor_types(), ids=lambda kind: kind.name)
def test_every_type_that_the_gguf_package_dequantises(tmp_path: Path, kind: gguf.GGMLQuantizationType):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    width = max(block, 32)
    raw = DICE.integers(0, 60, (HEADS * HEAD_DIM, width // block * size), np.uint8)  # small bytes: finite scales
    tensors = {"token_embd.weight": np.zeros((VOCAB, WIDTH), np.float32)}
    tensors |= {"blk.0.attn_q.weight": (raw, kind), "blk.0.attn_v.weight": (raw, kind)}
    checkpoint = opened(write_gguf(tmp_path / "a.gguf", metadata("llama"), tensors))
    expected = dequantize(raw, kind)
    assert np.isfinite(expected).all()
    assert expected.any()
    value = checkpoint.tensor("model.layers.0.self_attn.v_proj.weight")
    assert value.shape == (HEADS * HEAD_DIM, width)
    np.testing.assert_array_equal(value.read(), expected)
    query = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").read()
    np.testing.assert_array_equal(permute(query, HEADS), expected)


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path):
    tensors = {"token_embd.weight": np.zeros((4, 4), np.int32)}
    checkpoint = opened(write_gguf(tmp_path / "a.gguf", metadata("llama"), tensors))
    with pytest.raises(ValueError, match=r"'token_embd\.weight' has the type I32"):
        checkpoint.tensor("model.embed_tokens.weight").read()


def test_a_tensor_is_dequantised_in_bounded_pieces(tmp_path: Path):
    raw = np.ones((16384, 2048 // 32 * 34), np.uint8)  # Q8_0: 128 MiB as float32
    tensors = {"token_embd.weight": (raw, gguf.GGMLQuantizationType.Q8_0)}
    tensor = opened(write_gguf(tmp_path / "a.gguf", metadata("llama"), tensors)).tensor("model.embed_tokens.weight")
    del raw, tensors
    tracemalloc.start()
    values = tensor.read(np.dtype(ml_dtypes.bfloat16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values.nbytes == 64 << 20
    assert peak < values.nbytes + (48 << 20)


def test_a_tensor_of_no_known_name_keeps_its_own(tmp_path: Path):
    tensors = {"token_embd.weight": np.zeros((4, 4), np.float32), "blk.0.odd.weight": np.zeros(3, np.float32)}
    checkpoint = opened(write_gguf(tmp_path / "a.gguf", metadata("qwen2"), tensors))
    assert checkpoint.names() == ["model.embed_tokens.weight", "blk.0.odd.weight"]  # the loader lists it as unexpected


def config_of(tmp_path: Path, architecture: str, tensors: dict | None = None, **more) -> dict:
    tensors = {"token_embd.weight": np.zeros((VOCAB, WIDTH), np.float32)} | (tensors or {})
    return opened(write_gguf(tmp_path / "c.gguf", metadata(architecture, **more), tensors)).config


COMMON = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "rope_scaling": None, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "more", "expected"),
    [
        ("llama", {}, {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}),
        (
            "llama",
            {"attention.sliding_window": 4096},
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096},
        ),
        ("qwen2", {}, {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}),
        ("qwen3", {}, {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False}),
        (
            "gemma2",
            {"attention.sliding_window": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            {
                "architectures": ["Gemma2ForCausalLM"],
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "query_pre_attn_scalar": HEAD_DIM,
                "hidden_activation": "gelu_pytorch_tanh",
            },
        ),
        (
            "gemma3",
            {"attention.sliding_window": 64, "block_count": 7},
            {
                "architectures": ["Gemma3ForCausalLM"],
                "num_hidden_layers": 7,
                "sliding_window": 64,
                "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
                "rope_local_base_freq": 10000.0,
                "final_logit_softcapping": None,
                "query_pre_attn_scalar": HEAD_DIM,
            },
        ),
    ],
)
def test_the_config_is_hugging_faces(tmp_path: Path, architecture: str, more: dict, expected: dict):
    config = config_of(tmp_path, architecture, **more)
    wanted = COMMON | expected
    assert {key: config.get(key) for key in wanted} == wanted


def test_biases_and_untied_heads_are_seen_in_the_tensors(tmp_path: Path):
    bias = {"blk.0.attn_q.bias": np.zeros(HEADS * HEAD_DIM, np.float32)}
    head = {"output.weight": np.zeros((VOCAB, WIDTH), np.float32)}
    assert config_of(tmp_path, "llama", bias)["attention_bias"]
    assert not config_of(tmp_path, "llama", head)["attention_bias"]
    assert not config_of(tmp_path, "llama", head)["tie_word_embeddings"]


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_models_divide_by_another_number(tmp_path: Path, architecture: str, layers: int):
    more = {"attention.sliding_window": 64, "block_count": layers, "embedding_length": 48}
    assert config_of(tmp_path, architecture, **more)["query_pre_attn_scalar"] == 48 // HEADS


def llama3_factors(*, base: float, head_dim: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """llama.cpp's converter's loop: LlamaModel.generate_extra_tensors."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0, "low": 1.0, "high": 4.0, "original": 8192},  # Llama 3.1
        {"factor": 32.0, "low": 1.0, "high": 4.0, "original": 8192},  # Llama 3.2
        {"factor": 16.0, "low": 1.0, "high": 3.5, "original": 2048},
        {"factor": 4.0, "low": 1.0, "high": 8.0, "original": 32768},
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3s_rope_scaling_is_recovered_exactly(tmp_path: Path, scaling: dict, head_dim: int):
    factors = llama3_factors(base=500000.0, head_dim=head_dim, **scaling)
    sizes = {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.freq_base": 500000.0}
    config = config_of(tmp_path, "llama", {"rope_freqs.weight": factors}, **sizes)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": scaling["factor"],
        "low_freq_factor": scaling["low"],
        "high_freq_factor": scaling["high"],
        "original_max_position_embeddings": scaling["original"],
    }


def test_llama3s_rope_scaling_keeps_no_tensor(tmp_path: Path):
    factors = llama3_factors(base=1e6, head_dim=HEAD_DIM, factor=8.0, low=1.0, high=4.0, original=8192)
    tensors = {"token_embd.weight": np.zeros((VOCAB, WIDTH), np.float32), "rope_freqs.weight": factors}
    checkpoint = opened(write_gguf(tmp_path / "a.gguf", metadata("llama"), tensors))
    assert checkpoint.names() == ["model.embed_tokens.weight"]
    assert checkpoint.config["rope_scaling"]["rope_type"] == "llama3"


def test_rope_factors_of_another_kind_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"rope_freqs\.weight' holds no scaling of Llama 3's kind"):
        config_of(tmp_path, "llama", {"rope_freqs.weight": np.array([1, 3, 2, 9], np.float32)})


def test_other_rope_scalings(tmp_path: Path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    assert config_of(tmp_path, "llama", **linear)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    assert config_of(tmp_path, "qwen2", **yarn)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    with pytest.raises(ValueError, match="'longrope' is not supported"):
        config_of(tmp_path, "llama", **{"rope.scaling.type": "longrope"})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"expert_count": 8}, "mixtures of experts"),
        ({"attention.head_count": 0}, "0 heads"),
        ({"attention.head_count": "four"}, "must be a count, got 'four'"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "must be a number, got nan"),
        ({"rope.dimension_count": 4}, "differs from the head size 8"),
        ({"attention.head_count_kv": [1, 2]}, "must be a count"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, more: dict, reason: str):
    with pytest.raises(ValueError, match=reason):
        config_of(tmp_path, "llama", **more)


def test_an_unknown_architecture_lists_the_known(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'mamba' is not supported \(known: gemma2, gemma3, llama, qwen2, qwen3\)"):
        config_of(tmp_path, "mamba")


def test_equal_counts_of_every_layer_are_one_count(tmp_path: Path):
    assert config_of(tmp_path, "llama", **{"attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2


def test_the_packaged_model_opens_with_every_tensor():
    store = GGUFStore(real_model("smollm2-135m-instruct", fetch=True).path)
    assert len(store.names()) == 272
    assert sum(math.prod(store.tensor(name).shape) for name in store.names()) == 134_515_008
    assert (store.config["head_dim"], store.config["rope_theta"], store.config["rms_norm_eps"]) == (64, 100000.0, 1e-5)
    norm = store.tensor("model.norm.weight").read()
    assert norm.shape == (576,)
    assert np.isfinite(norm).all()
