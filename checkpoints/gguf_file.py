"""The container of a GGUF file: its metadata and its table of tensors, every length checked against the file's size.

Reads no tensor values and knows no architecture.  The `gguf` package's own reader makes several numpy objects for each
of a vocabulary's strings (ten seconds for Gemma's), and answers a damaged file with whatever numpy happens to raise.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Value = float | str | list[str] | np.ndarray

MAX_DIMS = 4  # ggml's own limit
MAX_NAME = 1 << 16

_STRING, _ARRAY = 8, 9
_SCALARS = {  # type number -> little-endian numpy type
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor's bytes lie."""

    shape: tuple[int, ...]  # numpy's order: slowest dimension first
    type_name: str  # ggml's name of the quantisation
    row_bytes: int  # bytes of one row (the last dimension)
    offset: int  # from the start of the file

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def width(self) -> int:
        return self.shape[-1]


class GGUFFile:
    """Raises ValueError naming the file and the place when the file is not a whole, sane GGUF."""

    def __init__(self, path: Path):
        self.path = path
        self.bytes = _map(path)
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, TensorEntry] = {}
        reader = _Reader(self.bytes, path)
        tensor_count, key_count = reader.header()
        for _ in range(key_count):
            key = reader.string("a metadata key", limit=MAX_NAME)
            reader.place = f"metadata {key!r}"
            if key in self.metadata:
                raise reader.error("is there twice")
            self.metadata[key] = reader.value(reader.scalar("<u4"))
        entries = [reader.tensor_info(index) for index in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{path}: general.alignment={alignment!r} is not a power of two")
        start = -(-reader.position // alignment) * alignment
        for name, dims, kind, offset in entries:
            if name in self.tensors:
                raise ValueError(f"{path}: tensor {name!r} is there twice")
            self.tensors[name] = self._entry(name, dims, kind, start + offset)

    def _entry(self, name: str, dims: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if kind not in set(GGMLQuantizationType):
            raise ValueError(f"{self.path}: tensor {name!r} has the unknown type {kind}; the file may be too new")
        quantisation = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        if dims[0] % block:
            raise ValueError(f"{self.path}: tensor {name!r} has rows of {dims[0]} values, no multiple of {block}")
        entry = TensorEntry(dims[::-1], quantisation.name, dims[0] // block * block_bytes, offset)
        end = offset + entry.rows * entry.row_bytes
        if end > len(self.bytes):
            raise ValueError(
                f"{self.path}: tensor {name!r} ends at byte {end} of a file of {len(self.bytes)}; the file is cut short"
            )
        return entry

    def rows(self, name: str) -> np.ndarray:
        """A tensor's bytes as they lie in the file, mapped and not read: [rows, row_bytes] uint8."""
        entry = self.tensors[name]
        flat = np.frombuffer(self.bytes, np.uint8, entry.rows * entry.row_bytes, entry.offset)
        return flat.reshape(entry.rows, entry.row_bytes)


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ValueError(f"{path} cannot be read: {error}") from None


class _Reader:
    """A cursor over the file's head that never reads past the end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data = data
        self.path = path
        self.position = 0
        self.place = "the header"

    def error(self, what: str) -> ValueError:
        return ValueError(
            f"{self.path}: {self.place} {what} (at byte {self.position}); the file is damaged or cut short"
        )

    def take(self, count: int) -> int:
        """Moves over `count` bytes and says where they begin."""
        begin = self.position
        if count > len(self.data) - begin:
            raise self.error(f"needs {count} bytes where {len(self.data) - begin} are left")
        self.position = begin + count
        return begin

    def scalar(self, dtype: str) -> float:
        kind = np.dtype(dtype)
        return np.frombuffer(self.data, kind, 1, self.take(kind.itemsize))[0].item()

    def count(self, item_bytes: int) -> int:
        """A number of things that follow, each at least `item_bytes` long: checked before anything is allocated."""
        value = int(self.scalar("<u8"))
        if value * item_bytes > len(self.data) - self.position:
            raise self.error(f"announces {value} items, more than the file can hold")
        return value

    def header(self) -> tuple[int, int]:
        magic = bytes(self.data[:4])
        if magic != b"GGUF":
            raise ValueError(f"{self.path} is not a GGUF file (it begins with {magic!r})")
        self.take(4)
        version = int(self.scalar("<u4"))
        if version not in (2, 3):
            big_endian = ", or a big-endian file" if version & 0xFFFF == 0 else ""
            raise ValueError(f"{self.path}: GGUF version {version}{big_endian} is not supported (2 and 3 are)")
        tensors = self.count(24)
        return tensors, self.count(12)

    def string(self, what: str, *, limit: int = 1 << 31) -> str:
        length = int(self.scalar("<u8"))
        if length > limit:
            raise self.error(f"holds {what} of {length} bytes")
        begin = self.take(length)
        try:
            return self.data[begin : self.position].decode()
        except UnicodeDecodeError:
            raise self.error(f"holds {what} that is not UTF-8") from None

    def value(self, kind: float) -> Value:
        if kind == _STRING:
            return self.string("a text")
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.error(f"has the unknown value type {kind}")
        return self.scalar(_SCALARS[int(kind)])

    def array(self) -> list[str] | np.ndarray:
        kind = int(self.scalar("<u4"))
        if kind == _STRING:
            return self.strings(self.count(_LENGTH.size))
        if kind not in _SCALARS:
            raise self.error(f"is an array of the unsupported type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        count = self.count(dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).copy()

    def strings(self, count: int) -> list[str]:
        """A vocabulary is a quarter of a million of these: the loop is bare."""
        data, position, read_length, end = self.data, self.position, _LENGTH.unpack_from, len(self.data)
        result: list[str] = []
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + read_length(data, position)[0]
                if position > end:
                    raise self.error(f"ends inside its item {len(result)}")
                result.append(data[begin:position].decode())
        except UnicodeDecodeError:
            raise self.error(f"item {len(result)} is not UTF-8") from None
        except struct.error:
            raise self.error(f"ends inside its item {len(result)}") from None
        self.position = position
        return result

    def tensor_info(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        self.place = f"the entry of tensor {index}"
        name = self.string("a name", limit=MAX_NAME)
        self.place = f"the entry of tensor {name!r}"
        num_dims = int(self.scalar("<u4"))
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.error(f"has {num_dims} dimensions")
        dims = tuple(int(self.scalar("<u8")) for _ in range(num_dims))
        if any(not 1 <= size < 2**40 for size in dims):
            raise self.error(f"has the dimensions {dims}")
        return name, dims, int(self.scalar("<u4")), int(self.scalar("<u8"))
