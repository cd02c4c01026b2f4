"""The engine's own checkpoints: what is saved comes back, in any layout, dtype and mesh, or the refusal is clear."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints import ModelFiles, open_checkpoint
from checkpoints.orbax_store import OrbaxStore, new_folder
from jaxserve.device.sharding import make_mesh
from jaxserve.models.loading import load_model, load_params
from jaxserve.models.saved import save_params
from tests.models.dense import FakeCheckpoint, run
from tests.models.tiny import CONFIGS, TOKENS


def load(family: str, *, tensor_parallel: int = 1, layout="list", dtype: str = "float32"):
    mesh = make_mesh(jax.devices(), tensor_parallel)
    return load_model(FakeCheckpoint(CONFIGS[family]), dtype=dtype, mesh=mesh, layout=layout)


def saved(folder: Path, family: str, **options) -> ModelFiles:
    with new_folder(folder) as draft:
        save_params(draft, *load(family, **options), config=CONFIGS[family], name="tiny")
    return ModelFiles("tiny", "orbax", folder)


def assert_same_trees(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding), jax.tree_util.keystr(path)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module", params=["list", "stacked"])
def checkpoint(request, tmp_path_factory) -> ModelFiles:
    return saved(tmp_path_factory.mktemp("saved") / "smollm2", "smollm2", layout=request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tensor_parallel", [1, 4])
@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_what_is_saved_loads_into_any_layout_dtype_and_mesh(checkpoint, layout, tensor_parallel, dtype):
    """As if it came from the original files, to the bit."""
    mesh = make_mesh(jax.devices(), tensor_parallel)
    model, params = load_params(checkpoint, dtype=dtype, mesh=mesh, layout=layout)
    _, want = load("smollm2", tensor_parallel=tensor_parallel, layout=layout, dtype=dtype)
    assert_same_trees(params, want)
    assert model.dtype == dtype


def test_a_saved_model_gives_the_same_logits(tmp_path):
    model, params = load("gemma3")
    again, restored = load_params(saved(tmp_path / "a", "gemma3"), dtype="float32", mesh=make_mesh(jax.devices(), 1))
    assert again.config == model.config
    np.testing.assert_array_equal(run(again, restored, TOKENS), run(model, params, TOKENS))


def test_a_saved_folder_opens_as_a_checkpoint_for_its_config(checkpoint):
    assert open_checkpoint(checkpoint).config == CONFIGS["smollm2"]


def test_kv_heads_saved_once_are_not_repeated_in_silence(tmp_path):
    files = saved(tmp_path / "a", "qwen3")
    with pytest.raises(ValueError, match="2 kv heads 1 times, tensor_parallel=4 needs them 2 times"):
        load_params(files, dtype="float32", mesh=make_mesh(jax.devices(), 4))


def test_repeated_kv_heads_load_on_the_same_mesh(tmp_path):
    files = saved(tmp_path / "a", "qwen3", tensor_parallel=4)
    _, params = load_params(files, dtype="float32", mesh=make_mesh(jax.devices(), 4))
    assert_same_trees(params, load("qwen3", tensor_parallel=4)[1])


def test_an_unknown_format_is_refused_with_both_numbers(tmp_path):
    files = saved(tmp_path / "a", "llama2")
    header = json.loads((files.path / "jaxserve.json").read_text())
    (files.path / "jaxserve.json").write_text(json.dumps(header | {"format": 0}))
    with pytest.raises(ValueError, match="saved in format 0, this version reads 1: convert the model again"):
        OrbaxStore(files.path)


def test_a_torn_folder_is_noticed_before_anything_is_read(tmp_path):
    files = saved(tmp_path / "a", "llama2")
    largest = max((path for path in files.path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"is not whole: 1 of \d+ files are missing or cut"):
        OrbaxStore(files.path)
    largest.unlink()
    with pytest.raises(ValueError, match="is not whole"):
        OrbaxStore(files.path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint saved by jaxserve: it has no jaxserve\.json"):
        OrbaxStore(tmp_path)
    (tmp_path / "jaxserve.json").write_text("{")
    with pytest.raises(ValueError, match=r"jaxserve\.json cannot be read"):
        OrbaxStore(tmp_path)


def test_a_tree_of_another_shape_is_an_error_not_a_guess(tmp_path):
    files = saved(tmp_path / "a", "llama2")
    config = json.loads((files.path / "config.json").read_text())
    header = json.loads((files.path / "jaxserve.json").read_text())
    (files.path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    header["files"]["config.json"] = (files.path / "config.json").stat().st_size
    (files.path / "jaxserve.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"mlp/down is \[64, 32\], the model wants \[128, 32\]"):
        load_params(files, dtype="float32", mesh=make_mesh(jax.devices(), 1))


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    def cut_short() -> None:
        with new_folder(tmp_path / "a") as draft:
            (draft / "half").write_text("x")
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        cut_short()
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "a") as draft:
        (draft / "whole").write_text("x")
        assert not (tmp_path / "a").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(ValueError, match="exists already"), new_folder(tmp_path / "a"):
        pass
