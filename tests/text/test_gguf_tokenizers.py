"""Tokenizers rebuilt from GGUF files give llama.cpp's ids for text of any kind (tables: make_llamacpp_tables.py)."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from checkpoints import ModelFiles
from jaxserve.request import RequestError
from jaxserve.text import Tokenizer, load_tokenizer
from tests.text.files import read_json, vocabulary, write_gguf

BPE, SENTENCEPIECE = read_json("tiny_bpe.json"), read_json("tiny_sentencepiece.json")

# Where llama.cpp abridges the original rule, which is the one to follow: qwen2's composes accents first, tekken's and
# gpt-4o's know capitals of every script, deepseek-coder's space is any space.
ABRIDGED = {
    "qwen2": lambda text: not unicodedata.is_normalized("NFC", text),
    "tekken": lambda text: "É" in text,
    "gpt-4o": lambda text: "É" in text,
    "deepseek-coder": lambda text: "\u3000" in text,
}


def load(folder: Path, model: str, content: dict, **more) -> Tokenizer:
    path = write_gguf(folder / "tiny.gguf", vocabulary(model, content, **more))
    return load_tokenizer(ModelFiles("tiny", "gguf", path))


@pytest.fixture
def bpe(tmp_path: Path) -> Tokenizer:
    return load(tmp_path, "gpt2", BPE, pre="smollm")


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Tokenizer:
    return load(tmp_path, "llama", SENTENCEPIECE["prefix"], add_space_prefix=True)


def check_table(tokenizer: Tokenizer, rows: list[dict]) -> None:
    for row in rows:
        plain = tokenizer.encode(row["text"], add_bos=False)
        assert plain == row["plain"], row["text"]
        assert tokenizer.encode(row["text"], add_bos=False, parse_special=True) == row.get("special", row["plain"])
        assert tokenizer.decode(plain, skip_special=False) == row["text"]
        assert not tokenizer.special_ids & set(plain)


@pytest.mark.parametrize("pre", BPE["tables"])
def test_bpe_of_every_pre_tokenizer_gives_llama_cpps_ids(tmp_path: Path, pre: str):
    rows = [row for row in BPE["tables"][pre] if not ABRIDGED.get(pre, str.isspace)(row["text"])]
    assert len(rows) > 40
    check_table(load(tmp_path, "gpt2", BPE, pre=pre), rows)


def test_a_word_that_is_a_token_needs_no_merges_by_llama3s_rule(tmp_path: Path):
    content = BPE | {"tokens": [*BPE["tokens"], "Ġzqzq"], "types": [*BPE["types"], 1]}
    whole = [len(BPE["tokens"])]
    assert load(tmp_path, "gpt2", content, pre="llama-bpe").encode(" zqzq", add_bos=False) == whole
    assert load(tmp_path, "gpt2", content, pre="gpt-2").encode(" zqzq", add_bos=False) != whole


@pytest.mark.parametrize("kind", ["prefix", "bare"])
def test_sentencepiece_gives_llama_cpps_ids(tmp_path: Path, kind: str):
    tokenizer = load(tmp_path, "llama", SENTENCEPIECE[kind], add_space_prefix=kind == "prefix")
    assert tokenizer.strips_leading_space == (kind == "prefix")
    check_table(tokenizer, SENTENCEPIECE[kind]["table"])


def test_real_bpe_gives_the_reference_ids(smollm2: Tokenizer):
    check_reference(smollm2, "smollm2")


def test_real_sentencepiece_gives_the_reference_ids(gemma3: Tokenizer):
    check_reference(gemma3, "gemma3")


def check_reference(tokenizer: Tokenizer, name: str) -> None:
    reference = read_json(f"{name}_reference.json")
    for row in reference["tokenization"]:
        assert tokenizer.encode(row["text"], add_bos=False) == row["ids"]
    for row in reference["user_text_with_special_strings"]:
        assert tokenizer.encode(row["text"], add_bos=False) == row["ids_as_plain_text"]
    for item in reference["prompts"]:
        assert tokenizer.encode(item["prompt"], parse_special=item["kind"] == "chat") == item["prompt_ids"]
        assert tokenizer.decode(item["output_ids"], skip_special=False) == item["output_text"]
    # A ▁ typed by a user is a space to SentencePiece itself, not to llama.cpp; </s> is HTML to Gemma, a control token
    # to llama.cpp.
    texts = [r for r in read_json(f"{name}_texts.json") if "▁" not in r["text"] and "</s>" not in r["text"]]
    assert len(texts) > 120
    check_table(tokenizer, texts)


def test_every_end_of_sequence_id_is_known(smollm2: Tokenizer):
    assert smollm2.eos_ids == (2, 0)  # <|im_end|>, <|endoftext|>
    assert smollm2.bos_id == 1
    assert not smollm2.adds_bos


def test_every_end_of_sequence_id_of_gemma_is_known(gemma3: Tokenizer):
    assert gemma3.eos_ids == (1, 106)  # <eos>, <end_of_turn>; not </s>, which is HTML
    assert gemma3.adds_bos
    assert not gemma3.strips_leading_space
    assert gemma3.decode([212]) == "</s>"


def test_turn_ends_are_end_of_sequence_ids_whatever_the_file_names(bpe: Tokenizer):
    assert {bpe.decode([i], skip_special=False) for i in bpe.eos_ids} == {"</s>", "<|im_end|>"}


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_exactly_one_bos(request: pytest.FixtureRequest, kind: str):
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    assert tokenizer.encode("hi", add_bos=True)[:1] == [1]
    assert tokenizer.encode("<s>hi", add_bos=True, parse_special=True).count(1) == 1
    assert tokenizer.encode("<s>hi", add_bos=True).count(1) == 1  # the typed one is plain text
    assert 1 not in tokenizer.encode("hi", add_bos=False)
    assert tokenizer.adds_bos == (kind == "sentencepiece")
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_bos=tokenizer.adds_bos)


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_a_saved_tokenizer_loads_as_the_same(request: pytest.FixtureRequest, tmp_path: Path, kind: str):
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(ModelFiles("saved", "hf", tmp_path / "saved"))
    for name in (
        "vocab_size",
        "bos_id",
        "eos_ids",
        "special_ids",
        "special_tokens",
        "adds_bos",
        "strips_leading_space",
    ):
        assert getattr(again, name) == getattr(tokenizer, name), name
    assert [again.token_bytes(i) for i in range(again.vocab_size)] == [
        tokenizer.token_bytes(i) for i in range(again.vocab_size)
    ]
    for row in BPE["tables"]["smollm"]:
        for special in (False, True):
            assert again.encode(row["text"], parse_special=special) == tokenizer.encode(
                row["text"], parse_special=special
            )


def test_a_template_for_tools_is_read(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    templates = {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t"}
    write_gguf(path, vocabulary("gpt2", BPE, pre="smollm") | templates)
    tokenizer = load_tokenizer(ModelFiles("tiny", "gguf", path))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("d", "t")


def test_a_lone_surrogate_is_refused(bpe: Tokenizer, sentencepiece: Tokenizer):
    for tokenizer in (bpe, sentencepiece):
        with pytest.raises(RequestError, match="lone surrogate"):
            tokenizer.encode("half \ud83d")


def test_an_id_without_a_token_adds_nothing(bpe: Tokenizer):
    assert bpe.token_bytes(bpe.vocab_size) == b""  # a model's vocabulary may be padded beyond its tokenizer's
    assert bpe.token_bytes(-1) == b""
    assert bpe.decode([-1, 10**9]) == ""


def test_an_unknown_pre_tokenizer_lists_the_known(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'klingon' is not known \(known: .*llama-bpe.*smollm"):
        load(tmp_path, "gpt2", BPE, pre="klingon")


def test_an_unknown_tokenizer_model_lists_the_known(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'rwkv' is not supported .*gpt2.*llama"):
        load(tmp_path, "rwkv", BPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "'tokenizer.ggml.tokens' must be a list"),
        ({"token_type": [1, 1]}, "token_type' must hold 7.. numbers"),
        ({"eos_token_id": 10**6}, "eos_token_id'=1000000 is no id below"),
        ({"merges": ["a b c"]}, "'a b c', which is no pair"),
        ({"merges": ["zz qq"]}, "merges' does not fit the tokens"),
        ({"tokens": ["a", "a"]}, "holds a token twice"),
    ],
)
def test_a_broken_vocabulary_is_one_clear_error(tmp_path: Path, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "gpt2", BPE, **({"pre": "smollm"} | change))
