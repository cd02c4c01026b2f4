"""A folder in Hugging Face layout: config.json beside one model.safetensors or several shards and their index.

Files are opened, and their heads checked, at once; values are read when asked for, in bounded pieces."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints import LazyTensor

PIECE_VALUES = 1 << 22  # values converted at a time when another dtype is asked for
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class SafetensorsStore:
    """Raises ValueError naming the file that is missing, damaged or not what the index says."""

    def __init__(self, folder: Path):
        self.config = _read_json(folder / "config.json")
        self._shards = {}  # name of a tensor -> its opened file
        for path, promised in _files(folder).items():
            shard = _open(path)
            held = list(shard.keys())
            if lost := sorted(promised - set(held)):
                raise ValueError(f"{path} does not hold {lost[0]!r} ({len(lost)} such tensors), though {INDEX} says so")
            for name in held:
                if name in self._shards:
                    raise ValueError(f"{path} holds {name!r}, which another file of the folder holds too")
                self._shards[name] = shard
        self._folder = folder

    def names(self) -> list[str]:
        return list(self._shards)

    def tensor(self, name: str) -> LazyTensor:
        values = self._shards[name].get_slice(name)
        shape, type_name = tuple(values.get_shape()), values.get_dtype()
        if type_name not in _DTYPES:
            raise ValueError(f"{self._folder}: tensor {name!r} has the type {type_name}, which is not supported")
        own = _DTYPES[type_name]

        def load(dtype: np.dtype) -> np.ndarray:
            if dtype == own or not shape:
                return self._shards[name].get_tensor(name).astype(dtype, copy=False)
            out = np.empty(shape, dtype)
            step = max(1, PIECE_VALUES * shape[0] // max(1, out.size))
            for begin in range(0, shape[0], step):
                end = min(begin + step, shape[0])
                out[begin:end] = values[begin:end]
            return out

        return LazyTensor(shape, own, load)


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, though {INDEX} names it") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from None


def _files(folder: Path) -> dict[Path, set[str]]:
    """The safetensors files, each with the tensors that the index promises to be in it."""
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX} holds no weight_map")
        files: dict[Path, set[str]] = {}
        for name, shard in weight_map.items():
            if Path(shard).name != shard:
                raise ValueError(f"{folder / INDEX} names {shard!r}, which is no file of its own folder")
            files.setdefault(folder / shard, set()).add(name)
        return files
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        what = f"{len(found)} .safetensors files and no {INDEX}" if found else "no .safetensors file"
        raise ValueError(f"{folder} holds {what}")
    return {found[0]: set()}


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content
