"""A .gguf file as a checkpoint: Hugging Face's names, values and config, dequantised tensor by tensor when asked for.

Never holds more than one tensor, and of a tensor never more than a few megabytes beside the result."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints import LazyTensor
from checkpoints.gguf_config import hf_config
from checkpoints.gguf_file import GGUFFile

PIECE_VALUES = 1 << 21  # values dequantised at a time: 8 MB of float32

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_BLOCK = _BLOCK | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_CONFIG = {"rope_freqs.weight"}  # told by config["rope_scaling"]
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


class GGUFStore:
    """Raises ValueError naming the file (and the tensor) when something is wrong with it."""

    def __init__(self, path: Path):
        self._gguf = GGUFFile(path)
        self.config = hf_config(self._gguf)
        self._architecture = str(self._gguf.metadata["general.architecture"])
        self._is_gemma = self._architecture.startswith("gemma")
        self._source = {self._hf_name(name): name for name in self._gguf.tensors if name not in _IN_CONFIG}

    def _hf_name(self, name: str) -> str:
        """A name this architecture does not have stays as it is: the loader lists it as unexpected."""
        if match := _BLOCK_NAME.fullmatch(name):
            layer, part, leaf = match.groups()
            part = (_GEMMA_BLOCK if self._is_gemma else _BLOCK).get(part)
            return f"model.layers.{layer}.{part}.{leaf}" if part else name
        part, _, leaf = name.rpartition(".")
        return f"{_OUTER[part]}.{leaf}" if part in _OUTER else name

    def names(self) -> list[str]:
        return list(self._source)

    def tensor(self, name: str) -> LazyTensor:
        source = self._source[name]
        entry = self._gguf.tensors[source]
        order = self._row_order(source, entry.shape)
        # llama.cpp keeps Gemma's norm weights as 1 + w, ready to multiply with.
        shift = -1.0 if self._is_gemma and source.endswith("norm.weight") else 0.0

        def load(dtype: np.dtype) -> np.ndarray:
            return self._dequantise(source, dtype, order=order, shift=shift)

        return LazyTensor(entry.shape, np.dtype(np.float32), load)

    def _row_order(self, source: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """Which row of the file is row i of Hugging Face's.  llama.cpp keeps the two halves of each head's rotary pairs
        interleaved, for the architecture "llama" alone."""
        match = _BLOCK_NAME.fullmatch(source)
        part = match[2] if match else ""
        if self._architecture != "llama" or part not in ("attn_q", "attn_k"):
            return None
        heads = self.config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if not heads or shape[0] % (2 * heads):
            raise ValueError(f"{self._gguf.path}: tensor {source!r} of shape {shape} does not split into {heads} heads")
        return np.arange(shape[0]).reshape(heads, shape[0] // heads // 2, 2).swapaxes(1, 2).ravel()

    def _dequantise(self, source: str, dtype: np.dtype, *, order: np.ndarray | None, shift: float) -> np.ndarray:
        entry = self._gguf.tensors[source]
        rows = self._gguf.rows(source)  # [rows, bytes]
        out = np.empty((entry.rows, entry.width), dtype)
        is_bias = len(entry.shape) == 1  # one row of the file: its values are permuted, not its rows
        step = max(1, PIECE_VALUES // entry.width)
        for begin in range(0, entry.rows, step):
            piece = slice(begin, begin + step)
            values = self._values(source, rows[piece if order is None or is_bias else order[piece]], entry.type_name)
            out[piece] = values + np.float32(shift) if shift else values
        out = out.reshape(entry.shape)
        return out[order] if order is not None and is_bias else out

    def _values(self, source: str, piece: np.ndarray, type_name: str) -> np.ndarray:
        try:
            return dequantize(piece, GGMLQuantizationType[type_name])
        except NotImplementedError:
            message = f"tensor {source!r} has the type {type_name}, which the gguf package cannot dequantise"
            raise ValueError(f"{self._gguf.path}: {message}") from None
