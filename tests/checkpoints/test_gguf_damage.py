"""A damaged GGUF file is one clear ValueError that names it: never a traceback, never memory that is not there."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.gguf_file import GGUFFile
from checkpoints.gguf_store import GGUFStore
from jaxserve.text.gguf import load
from tests.text.files import read_json, vocabulary, write_gguf


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sane file with a vocabulary of either kind and a few tensors."""
    content = read_json("tiny_bpe.json") if request.param == "gpt2" else read_json("tiny_sentencepiece.json")["bare"]
    content = {name: content[name][:300] for name in ("tokens", "types", "scores", "merges") if name in content}
    if "merges" in content:
        content["merges"] = [merge for merge in content["merges"] if merge.replace(" ", "") in content["tokens"]]
    keys = {"block_count": 1, "context_length": 64, "embedding_length": 16, "feed_forward_length": 32}
    keys |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    meta = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in keys.items()}
    tensors = {"token_embd.weight": np.ones((8, 16), np.float32), "blk.0.attn_q.weight": np.ones((16, 16), np.float32)}
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    return write_gguf(path, meta | vocabulary(request.param, content, pre="gpt-2"), tensors).read_bytes()


def read_all(path: Path) -> None:
    store = GGUFStore(path)
    for name in store.names():
        store.tensor(name).read()
    load(path).encode("any text")


def refused(path: Path, data: bytes) -> str | None:
    """The error's text, or None where the damage was harmless."""
    path.write_bytes(data)
    try:
        read_all(path)
    except ValueError as error:
        reason = str(error)
    else:
        return None
    assert str(path) in reason
    assert "\n" not in reason
    return reason


def test_the_whole_file_is_read(tmp_path: Path, whole: bytes):
    assert refused(tmp_path / "a.gguf", whole) is None


@settings(max_examples=75)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject):
    length = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    assert refused(path, whole[:length])


@settings(max_examples=200)
@given(data=st.data())
def test_damaged_bytes_never_cause_anything_but_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
):
    damaged = bytearray(whole)
    head = st.integers(0, len(whole) - 1) | st.integers(0, 800)
    for position in data.draw(st.lists(head, min_size=1, max_size=4)):
        damaged[position] = data.draw(st.sampled_from([0, 1, 7, 8, 9, 0x7F, 0x80, 0xFF]))
    refused(tmp_path_factory.getbasetemp() / "damaged.gguf", bytes(damaged))


HEAD = struct.Struct("<4sIQQ")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04 and more bytes than a header", "not a GGUF file"),
        (HEAD.pack(b"GGUF", 1, 0, 0), "version 1 is not supported"),
        (HEAD.pack(b"GGUF", 0x03000000, 0, 0), "big-endian"),
        (HEAD.pack(b"GGUF", 3, 2**60, 0), "announces 1152921504606846976 items"),
        (HEAD.pack(b"GGUF", 3, 0, 2**60), "announces 1152921504606846976 items"),
        (HEAD.pack(b"GGUF", 3, 0, 1) + text(b"k") + struct.pack("<I", 99), "'k' has the unknown value type 99"),
        (HEAD.pack(b"GGUF", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 4, 2**62), "'k' announces"),
        (HEAD.pack(b"GGUF", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "array of the unsupported type 9"),
        (HEAD.pack(b"GGUF", 3, 0, 1) + text(b"k") + struct.pack("<IQ", 8, 2**63), "holds a text of"),
        (HEAD.pack(b"GGUF", 3, 0, 1) + text(b"\xff") + struct.pack("<IB", 0, 1), "not UTF-8"),
        (HEAD.pack(b"GGUF", 3, 0, 2) + 2 * (text(b"k") + struct.pack("<IB", 0, 1)), "'k' is there twice"),
        (HEAD.pack(b"GGUF", 3, 1, 0) + text(b"t") + struct.pack("<I", 9) + b"\0" * 99, "has 9 dimensions"),
        (
            HEAD.pack(b"GGUF", 3, 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 2**39, 0, 0),
            "'t' ends at byte .*cut short",
        ),
        (HEAD.pack(b"GGUF", 3, 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 32, 77, 0), "unknown type 77"),
        (HEAD.pack(b"GGUF", 3, 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0), "33 values, no multiple of 32"),
        (
            HEAD.pack(b"GGUF", 3, 0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 3),
            "alignment=3 is not a power of two",
        ),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path: Path, data: bytes, reason: str):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=reason) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nowhere\.gguf cannot be read"):
        GGUFFile(tmp_path / "nowhere.gguf")
