"""Files on a disk -> named host arrays.  Knows nothing of jaxserve, of kernels or of devices.

A checkpoint speaks Hugging Face's language whatever its format: config.json's keys, its tensor names, its values."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

Kind = Literal["hf", "gguf", "orbax"]

# kind of files -> "module:object", a callable that takes the path; imported when chosen
STORES = {
    "hf": "checkpoints.safetensors_store:SafetensorsStore",
    "gguf": "checkpoints.gguf_store:GGUFStore",
    "orbax": "checkpoints.orbax_store:OrbaxStore",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies on this machine."""

    name: str  # what the model is called in answers: the packaged name, the folder's or file's name, org/name
    kind: Kind
    path: Path  # a folder for "hf" and "orbax", a file for "gguf"


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One tensor whose bytes are read when asked for.  `dtype` is what `read()` gives."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[np.dtype], np.ndarray]  # reads, converting on the way in bounded pieces

    def read(self, dtype: np.dtype | None = None) -> np.ndarray:
        """The values, in `dtype` when one is given: a wider copy of the whole tensor is never made on the way."""
        return self.load(self.dtype if dtype is None else np.dtype(dtype))


class Checkpoint(Protocol):
    """Names, shapes and values in Hugging Face's convention."""

    config: dict  # config.json's content

    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> LazyTensor: ...


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Opens a checkpoint without reading its weights.  Raises ValueError naming the file at fault."""
    module, _, name = STORES[files.kind].partition(":")
    return getattr(importlib.import_module(module), name)(files.path)
