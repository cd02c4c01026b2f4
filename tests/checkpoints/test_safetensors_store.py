"""Folders in Hugging Face layout: every tensor comes back, one at a time, and what is wrong is named."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import ModelFiles, open_checkpoint

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.linspace(-3, 3, 10).astype(ml_dtypes.bfloat16).reshape(5, 2),
    "c.bias": np.array([1.5, -2], np.float16),
    "scalar": np.array(7, np.int32),
    "empty": np.zeros((0, 4), np.float32),
}


def write(folder: Path, *, shards: int = 1) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if shards == 1:
        save_file(TENSORS, folder / "model.safetensors")
        return
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(TENSORS)}
    for file in set(weight_map.values()):
        save_file({name: TENSORS[name] for name in TENSORS if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def opened(folder: Path):
    return open_checkpoint(ModelFiles("x", "hf", folder))


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_comes_back(tmp_path: Path, shards: int):
    write(tmp_path, shards=shards)
    checkpoint = opened(tmp_path)
    assert checkpoint.config == {"model_type": "llama"}
    assert sorted(checkpoint.names()) == sorted(TENSORS)
    for name, expected in TENSORS.items():
        tensor = checkpoint.tensor(name)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(tensor.read(), expected, strict=True)
        np.testing.assert_array_equal(tensor.read(np.dtype(np.float32)), expected.astype(np.float32), strict=True)


def test_another_dtype_is_read_in_bounded_pieces(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"big": np.ones((4096, 8192), np.float32)}, tmp_path / "model.safetensors")  # 128 MiB
    tensor = opened(tmp_path).tensor("big")
    tracemalloc.start()
    values = tensor.read(np.dtype(ml_dtypes.bfloat16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values.nbytes == 64 << 20
    assert peak < values.nbytes + (40 << 20)


def test_a_missing_config_is_named(tmp_path: Path):
    write(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        opened(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_config_is_named(tmp_path: Path, content: str):
    write(tmp_path)
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        opened(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path):
    write(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        opened(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 8, 60, -1])
def test_a_file_cut_short_is_named(tmp_path: Path, length: int):
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        opened(tmp_path)


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path):
    write(tmp_path, shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"00001-of-00002\.safetensors does not hold 'ghost'"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "reason"), [({"a": "../a.safetensors"}, "no file of its own folder"), ({}, "no weight_map")]
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, weight_map: dict, reason: str):
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=reason):
        opened(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    write(tmp_path, shards=2)
    save_file(TENSORS, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match="which another file of the folder holds too"):
        opened(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no \.safetensors file"):
        opened(tmp_path)
    for name in ("a", "b"):
        save_file({name: np.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"2 \.safetensors files and no model\.safetensors\.index\.json"):
        opened(tmp_path)
