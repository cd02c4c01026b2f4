"""`scripts/convert.py`: a folder in Hugging Face layout becomes one that loads as it lies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checkpoints.hub import resolve
from jaxserve.device.sharding import make_mesh
from jaxserve.models.loading import load_params
from jaxserve.text import load_tokenizer
from tests.models.dense import FakeCheckpoint
from tests.models.tiny import CONFIGS, VOCAB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A tiny Qwen 2 with a byte-level vocabulary, as its authors would publish it."""
    folder = tmp_path_factory.mktemp("hf") / "tiny-qwen2"
    folder.mkdir()
    config = CONFIGS["qwen2"] | {"vocab_size": 256 + 2, "eos_token_id": 257}
    checkpoint = FakeCheckpoint(config)
    save_file({name: checkpoint.tensor(name).read() for name in checkpoint.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def convert(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts" / "convert.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)


def test_a_converted_model_is_the_same_model(source, tmp_path):
    assert VOCAB < 258
    done = convert(source, tmp_path / "saved", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert "loaded in" in done.stdout
    assert "float32" in done.stdout
    files = resolve(str(tmp_path / "saved"))
    assert files.kind == "orbax"
    mesh = make_mesh(jax.devices(), 1)
    model, params = load_params(files, dtype="float32", mesh=mesh)
    original, wanted = load_params(resolve(str(source)), dtype="float32", mesh=mesh)
    assert model.config == original.config
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    text = "Grüße, 世界"
    assert load_tokenizer(files).encode(text) == load_tokenizer(resolve(str(source))).encode(text)


def test_a_taken_destination_or_a_bad_source_is_an_error_of_one_line(source, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    for arguments, message in (
        ((source, tmp_path / "taken"), "exists already"),
        ((tmp_path / "none", tmp_path / "x"), "none"),
    ):
        done = convert(*arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
