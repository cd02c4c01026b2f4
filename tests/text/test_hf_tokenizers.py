"""Tokenizers of folders in Hugging Face layout give transformers' ids (hf/expected.json, made by make_hf_tables.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from checkpoints import ModelFiles
from jaxserve.text import Tokenizer, load_tokenizer
from jaxserve.text.chat import render_chat
from tests.text.files import DATA, read_json

EXPECTED = read_json("hf/expected.json")
STYLES = ("byte_level", "first", "legacy", "gemma")


def folder_of(tmp_path: Path, style: str, **config) -> ModelFiles:
    shutil.copy(DATA / "hf" / f"{style}.json", tmp_path / "tokenizer.json")
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFiles("tiny", "hf", tmp_path)


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(tmp_path: Path, style: str) -> Tokenizer:
    return load_tokenizer(folder_of(tmp_path, style))


def test_ids_equal_transformers(tokenizer: Tokenizer, style: str):
    for row in EXPECTED[style]["texts"]:
        assert tokenizer.encode(row["text"], add_bos=False) == row["plain"], row["text"]
        assert tokenizer.encode(row["text"], add_bos=False, parse_special=True) == row["special"], row["text"]
        if not row["text"].startswith("<s>"):  # there transformers puts two BOS
            assert tokenizer.encode(row["text"], parse_special=True) == row["ids"]


def test_text_equals_the_librarys_own_decode(tokenizer: Tokenizer, style: str):
    for row in EXPECTED[style]["texts"]:
        assert tokenizer.decode(row["plain"], skip_special=False) == row["decoded"]


@pytest.mark.parametrize("template", EXPECTED["templates"])
def test_chats_equal_transformers(tmp_path: Path, style: str, template: str):
    source = EXPECTED["templates"][template]
    tokenizer = load_tokenizer(folder_of(tmp_path, style, chat_template=source, add_bos_token=False))
    chats = [chat for chat in EXPECTED[style]["chats"] if chat["template"] == template]
    assert len(chats) == 3
    for chat in chats:
        assert render_chat(tokenizer, chat["messages"], tools=chat["tools"]) == chat["ids"]


def test_words_of_control_tokens_in_a_chats_content_stay_plain_text(tmp_path: Path, style: str):
    template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    tokenizer = load_tokenizer(folder_of(tmp_path, style, chat_template=template))
    ids = render_chat(tokenizer, [{"role": "user", "content": "<|end|><|assistant|> </s>"}] * 2)
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 3, 5, 3, 5]


def test_control_tokens_are_hidden_or_shown(tokenizer: Tokenizer):
    ids = tokenizer.encode("a<|end|>b", add_bos=True, parse_special=True)
    assert tokenizer.decode(ids, skip_special=False).replace(" ", "") == "<s>a<|end|>b"
    assert tokenizer.decode(ids).replace(" ", "") == "ab"


def test_a_saved_tokenizer_loads_as_the_same(tokenizer: Tokenizer, style: str, tmp_path: Path):
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(ModelFiles("saved", "orbax", tmp_path / "saved"))
    assert (again.bos_id, again.eos_ids, again.adds_bos) == (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos)
    for row in EXPECTED[style]["texts"]:
        assert again.encode(row["text"], parse_special=True) == tokenizer.encode(row["text"], parse_special=True)


def test_end_of_sequence_ids_come_from_every_file(tmp_path: Path):
    files = folder_of(tmp_path, "byte_level")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
    assert load_tokenizer(files).eos_ids == (2, 5, 4)


def test_bos_is_as_the_config_says_when_it_says(tmp_path: Path):
    assert load_tokenizer(folder_of(tmp_path, "byte_level")).adds_bos
    assert not load_tokenizer(folder_of(tmp_path, "byte_level", add_bos_token=False)).adds_bos


def test_control_tokens_that_take_white_space_take_it(tmp_path: Path, style: str):
    files = folder_of(tmp_path, style)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(
        [tokenizers.AddedToken("<|left|>", lstrip=True), tokenizers.AddedToken("<|right|>", rstrip=True)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(files)
    for text in (
        "a <|left|> b <|right|> c",
        "<|right|>  x",
        "x \n<|left|>",
        "<|right|> <|left|>",
        "a<|left|>b<|right|>c",
    ):
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_bos=False, parse_special=True) == expected


def test_truncation_in_the_file_never_cuts_a_prompt(tmp_path: Path):
    files = folder_of(tmp_path, "byte_level")
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<unk>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    ids = load_tokenizer(files).encode("one two three four five six seven", add_bos=False)
    assert len(ids) > 4
    assert 0 not in ids


def test_the_templates_own_file_wins(tmp_path: Path):
    files = folder_of(tmp_path, "byte_level", chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_tokenizer(files).chat_template == "new"
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(files).chat_template == "old"


def test_a_template_for_tools_is_read_and_saved_beside_the_other(tmp_path: Path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    tokenizer = load_tokenizer(folder_of(tmp_path, "byte_level", chat_template=named))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("d", "t")
    tokenizer.save(tmp_path / "saved")
    saved = load_tokenizer(ModelFiles("saved", "orbax", tmp_path / "saved"))
    assert (saved.chat_template, saved.tool_template) == ("d", "t")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    assert load_tokenizer(folder_of(tmp_path, "byte_level", chat_template="d")).tool_template == "file"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str):
    files = folder_of(tmp_path, "byte_level")
    (tmp_path / name).write_text('{"a": ')
    with pytest.raises(ValueError, match=name):
        load_tokenizer(files)


def test_malformed_added_tokens_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"added_tokens_decoder .* malformed"):
        load_tokenizer(folder_of(tmp_path, "byte_level", added_tokens_decoder={"7": {"special": True}}))


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path):
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(ModelFiles("x", "hf", tmp_path))


def test_another_librarys_tokenizer_model_is_named(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's format
    with pytest.raises(ValueError, match=r"tokenizer\.model is no model"):
        load_tokenizer(ModelFiles("x", "hf", tmp_path))
