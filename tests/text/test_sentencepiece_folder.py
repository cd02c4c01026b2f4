"""tokenizer.model beside its configs: the library's own ids, the leading space, and tokens added beside the model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece

from checkpoints import ModelFiles
from jaxserve.text import Tokenizer, load_tokenizer

TEXTS = ["the quick brown fox", " leading", "two  spaces", "naïve 🫠\n\nrow", "x", "fox <b>the</b>", "<s>the</s>"]
ADDED = {"added_tokens_decoder": {
    "0": {"content": "<unk>", "special": True},
    "300": {"content": "<|im_start|>", "special": True},
    "302": {"content": "<tool>", "special": False},
}}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog", "two spaces and the naïve row"] * 20),
        model_writer=out, vocab_size=300, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return out.getvalue()


def load(folder: Path, model: bytes, **config) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(model)
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(ModelFiles("x", "hf", folder))


def test_ids_and_text_are_the_librarys(tmp_path: Path, model: bytes):
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = load(tmp_path, model)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2,), True)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids, skip_special=False) == library.decode(ids) == text
        assert tokenizer.encode(text) == [1, *ids]


def test_end_of_sequence_is_the_models_own_without_a_config(tmp_path: Path, model: bytes):
    tokenizer = load(tmp_path, model, bos_token=None, eos_token=None)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))


def test_text_behind_a_control_token_gets_a_space_only_by_the_legacy_rule(tmp_path: Path, model: bytes):
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    spaced = library.encode("the fox")
    bare = load(tmp_path, model, legacy=False).encode("</s>the fox", add_bos=False, parse_special=True)
    assert load(tmp_path, model).encode("</s>the fox", add_bos=False, parse_special=True) == [2, *spaced]
    assert load(tmp_path, model, legacy=False).encode("the fox", add_bos=False) == spaced
    assert bare != [2, *spaced]
    assert b"".join(load(tmp_path, model).token_bytes(i) for i in bare[1:]) == b"the fox"


@pytest.mark.parametrize("again", [False, True])
def test_tokens_added_beside_the_model(tmp_path: Path, model: bytes, again: bool):
    tokenizer = load(tmp_path, model, legacy=False, **ADDED)
    if again:
        tokenizer.save(tmp_path / "saved")
        tokenizer = load_tokenizer(ModelFiles("x", "hf", tmp_path / "saved"))
    assert tokenizer.vocab_size == 303
    assert tokenizer.token_bytes(301) == b""
    assert 300 in tokenizer.special_ids
    assert 302 not in tokenizer.special_ids
    ids = tokenizer.encode("the<tool>fox <|im_start|>", add_bos=False)
    assert ids.count(302) == 1  # an ordinary token is found in any text,
    assert 300 not in ids  # a control token in none
    assert tokenizer.decode(ids) == "the<tool>fox <|im_start|>"
    assert tokenizer.encode("<|im_start|>the", add_bos=False, parse_special=True)[0] == 300
