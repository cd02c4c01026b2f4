"""Loading: strict about names and shapes, lean in memory, clear about what it does not do."""

from __future__ import annotations

import tracemalloc
import weakref

import jax
import numpy as np
import pytest

from checkpoints import LazyTensor
from jaxserve.device.sharding import kv_heads_per_mesh, make_mesh
from jaxserve.models.loading import load_model
from jaxserve.models.tree import make_model
from tests.models.dense import FakeCheckpoint
from tests.models.tiny import CONFIGS


def load(checkpoint: FakeCheckpoint, **options):
    options = {"dtype": "float32", "mesh": make_mesh(jax.devices(), 1)} | options
    return load_model(checkpoint, **options)


def test_loads_strictly():
    checkpoint = FakeCheckpoint(CONFIGS["llama2"])
    del checkpoint.shapes["model.layers.1.mlp.up_proj.weight"]
    checkpoint.shapes["model.layers.0.mlp.experts.weight"] = (3,)
    checkpoint.shapes["lm_head.weight"] = (7, 32)
    with pytest.raises(ValueError) as error:
        load(checkpoint)
    for part in (
        "1 missing: model.layers.1.mlp.up_proj.weight",
        "1 unexpected: model.layers.0.mlp.experts.weight",
        "lm_head.weight is (7, 32) instead of (160, 32)",
        "LlamaForCausalLM",
    ):
        assert part in str(error.value)


def test_an_untied_head_must_be_there():
    checkpoint = FakeCheckpoint(CONFIGS["llama2"])
    del checkpoint.shapes["lm_head.weight"]
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"):
        load(checkpoint)


def test_tensors_that_repeat_the_config_are_passed_over():
    checkpoint = FakeCheckpoint(CONFIGS["smollm2"])
    checkpoint.shapes["lm_head.weight"] = (160, 32)  # tied all the same
    checkpoint.shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (4,)
    _, params = load(checkpoint)
    assert "head" not in params["outer"]


def test_a_tensor_that_lies_about_its_shape_is_caught():
    checkpoint = FakeCheckpoint(CONFIGS["llama2"])
    honest = checkpoint.tensor

    def lying(name: str) -> LazyTensor:
        tensor = honest(name)
        return LazyTensor(shape=tensor.shape, dtype=tensor.dtype, load=lambda dtype: tensor.read(dtype)[:1])

    checkpoint.tensor = lying
    with pytest.raises(ValueError, match=r"is \(1, 32\) instead of \(160, 32\)"):
        load(checkpoint)


@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_memory_at_load_is_bounded(layout):
    """Numpy memory never passes 1.3 x the weights in the target dtype, and one tensor of the file is held at a time."""
    config = CONFIGS["llama2"] | {
        "num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048
    }  # fmt: skip
    checkpoint = FakeCheckpoint(config)
    plain = checkpoint.tensor
    alive: set[str] = set()
    most = 0

    def counted(name: str) -> LazyTensor:
        def read(dtype: np.dtype) -> np.ndarray:
            nonlocal most
            array = np.zeros(checkpoint.shapes[name], dtype)
            alive.add(name)
            weakref.finalize(array, alive.discard, name)
            most = max(most, len(alive))
            return array

        return LazyTensor(shape=plain(name).shape, dtype=plain(name).dtype, load=read)

    checkpoint.tensor = counted
    tracemalloc.start()
    _, params = load(checkpoint, dtype="bfloat16", layout=layout)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert total > 15e6, "large enough to stand out from what else numpy holds"
    assert peak < 1.3 * total, f"{peak / total:.2f} x the weights"
    assert most <= 2, f"{most} tensors of the file were held together"  # the last one, while the next is read


def test_progress_ends_at_the_whole():
    seen = []
    _, params = load(FakeCheckpoint(CONFIGS["gemma2"]), progress=lambda done, total: seen.append((done, total)))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama2", {"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported: Gemma2"),
        ("llama2", {"architectures": []}, "must name one architecture"),
        ("llama2", {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ("llama2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported; supported:"),
        ("llama2", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
        ("llama2", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor, high_freq_factor"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama2", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotary_factor"),
        ("llama2", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("llama2", {"rms_norm_eps": None, "vocab_size": None}, "lacks vocab_size, rms_norm_eps"),
        ("llama2", {"num_key_value_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
        ("llama2", {"num_hidden_layers": 0}, "layers=0"),
        ("llama2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ("qwen2", {"sliding_window": None}, "lacks sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "given for 1 layers, the model has 2"),
        ("qwen3", {"head_dim": None}, "lacks head_dim"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "it holds full_attention"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(family, change, message):
    with pytest.raises(ValueError) as error:
        make_model(CONFIGS[family] | change, dtype="float32", tensor_parallel=1)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "held"),
    [(8, 4, 2, 4), (8, 4, 4, 4), (8, 2, 4, 4), (8, 1, 8, 8), (9, 3, 3, 3), (9, 3, 1, 3), (9, 3, 9, 9)],
)
def test_kv_heads_are_split_or_repeated(heads, kv_heads, devices, held):
    assert kv_heads_per_mesh(heads=heads, kv_heads=kv_heads, tensor_parallel=devices) == held


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "message"),
    [(9, 3, 2, "N=9 .* tensor_parallel=2"), (12, 3, 2, "K=3 kv heads fit tensor_parallel=2 neither way")],
)
def test_heads_that_do_not_fit_a_mesh_are_refused_with_the_numbers(heads, kv_heads, devices, message):
    with pytest.raises(ValueError, match=message):
        kv_heads_per_mesh(heads=heads, kv_heads=kv_heads, tensor_parallel=devices)


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match=f"tensor_parallel=99 .* {len(jax.devices())} devices"):
        make_mesh(jax.devices(), 99)
    with pytest.raises(ValueError, match="F=64 does not divide by tensor_parallel=3"):
        make_model(CONFIGS["llama2"] | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
                   dtype="float32", tensor_parallel=3)  # fmt: skip


def test_a_vocabulary_that_does_not_divide_stays_whole():
    config = CONFIGS["smollm2"] | {"vocab_size": 161}
    _, params = load(FakeCheckpoint(config), mesh=make_mesh(jax.devices(), 4))
    assert params["outer"]["embed"].sharding.is_fully_replicated
