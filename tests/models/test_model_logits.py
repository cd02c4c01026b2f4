"""Every family against Hugging Face transformers, in every layout and on every mesh."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.sharding import make_mesh
from jaxserve.models.loading import load_model
from tests.models.dense import EXPECTED, FakeCheckpoint, run
from tests.models.tiny import CONFIGS, TOKENS

FAMILIES = sorted(CONFIGS)


def load(family: str, *, tensor_parallel: int = 1, dtype: str = "float32", layout=None, config: dict | None = None):
    mesh = make_mesh(jax.devices(), tensor_parallel)
    return load_model(FakeCheckpoint(config or CONFIGS[family]), dtype=dtype, mesh=mesh, layout=layout)


def expected(family: str) -> np.ndarray:
    with np.load(EXPECTED / f"{family}.npz") as stored:
        return stored["logits"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family):
    np.testing.assert_allclose(run(*load(family), TOKENS), expected(family), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_stacked_layers_give_the_logits_of_a_list(family):
    model, params = load(family, layout="stacked")
    assert isinstance(params["blocks"], dict), "the stacked layout is one tree"
    np.testing.assert_allclose(run(model, params, TOKENS), expected(family), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama_linear_biases", "qwen2", "smollm2", "gemma3"])
@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_a_mesh_gives_the_logits_of_one_device(family, tensor_parallel):
    """K = 2 on four devices: kv heads are repeated; K = 4: each device has one."""
    model, params = load(family, tensor_parallel=tensor_parallel)
    kv_heads = CONFIGS[family]["num_key_value_heads"]
    assert model.shape.kv_heads == max(kv_heads, tensor_parallel)
    for name, leaf in params["blocks"][0]["attention"].items():
        shards = {shard.data.shape for shard in leaf.addressable_shards}
        assert (len(leaf.sharding.device_set), len(shards)) == (tensor_parallel, 1), name
    qkv = params["blocks"][0]["attention"]["qkv"]
    assert qkv.addressable_shards[0].data.shape[1] * tensor_parallel == qkv.shape[1], "heads are split"
    np.testing.assert_allclose(run(model, params, TOKENS), expected(family), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_of_a_config_mean_the_same_model(family):
    new = json.loads((EXPECTED / f"{family}.json").read_text())
    assert "rope_parameters" in new
    assert "rope_theta" not in new
    assert load(family, config=new)[0].config == load(family)[0].config


@pytest.mark.parametrize("family", ["smollm2", "gemma2"])
def test_bfloat16_is_near_float32(family):
    model, params = load(family, dtype="bfloat16")
    assert params["outer"]["embed"].dtype == jnp.bfloat16
    got = run(model, params, TOKENS)
    assert got.dtype == np.float32
    error = np.abs(got - expected(family)).mean() / np.abs(expected(family)).mean()
    assert 1e-4 < error < 0.05, f"bfloat16 weights move the logits by {error:.3%}"


def test_repeated_kv_heads_serve_their_own_queries():
    """The pool of a wide mesh holds each kv head several times; query heads keep theirs."""
    narrow, wide = (load("qwen3", tensor_parallel=devices)[1]["blocks"][0]["attention"] for devices in (1, 4))
    one = np.asarray(narrow["qkv"]).reshape(32, 2, 2 + 2, 16)  # [D, K, G + 2, H]
    four = np.asarray(wide["qkv"]).reshape(32, 4, 1 + 2, 16)
    np.testing.assert_array_equal(four[:, :, 0], one[:, :, :2].reshape(32, 4, 16))
    np.testing.assert_array_equal(four[:, :, 1:], np.repeat(one[:, :, 2:], 2, axis=1))
