"""Tool calls in a stream: found whatever the chunk borders, nothing lost, and no call where there is none."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.text.json_object import JsonObject
from jaxserve.text.tool_calls import ToolCallParser
from jaxserve.text.tool_forms import FORMS, HERMES, LLAMA3, ToolForm

Result = tuple[str, list[tuple[str | None, str | None, str]]]  # content, (id, name, arguments) of each call


def parse(form: ToolForm, pieces: list[str]) -> Result:
    """Everything that the deltas say, and that each says a call's id and name at its beginning only."""
    numbers = itertools.count()
    parser = ToolCallParser(form, new_id=lambda: f"id{next(numbers)}")
    content, calls = "", []
    for delta in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        content += delta.content
        assert [call.index for call in delta.calls] == sorted({call.index for call in delta.calls})
        for call in delta.calls:
            if call.index == len(calls):
                assert call.id and call.name
                calls.append((call.id, call.name, ""))
            else:
                assert call.index == len(calls) - 1 and call.id is None and call.name is None and call.arguments
            name, words = calls[-1][1], calls[-1][2] + call.arguments
            calls[-1] = (calls[-1][0], name, words)
    assert parser.num_calls == len(calls)
    return content, calls


def cut(text: str, borders: list[int]) -> list[str]:
    places = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


BORDERS = st.lists(st.integers(0, 400), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    lambda value, ascii, indent: json.dumps(value, ensure_ascii=ascii, indent=indent),
    st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
)
NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
WHITE = st.text(" \n\t\r", max_size=3)
# Words of every kind of marker, whole and in pieces.
FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool", "_call>", "<", "</", "<|python_tag|>", "<|python", "_tag|>", ";", "\n", " ",
     '{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '{"na', 'me": "f"', ', "arguments": ', ', "parameters":',
     "{", "}", "{}", '{"a": [1, "x"]}', '"', "\\", "[", "tru", "é🫠", "word"]
)  # fmt: skip


def write_call(form: ToolForm, name: str, arguments: str, space: str = "") -> str:
    inner = f'{space}{{{space}"name"{space}:{space}"{name}"{space},{space}"{form.arguments_key}":{space}{arguments}'
    return f"{form.opening}{inner}{space}}}" + (space + form.closing if form.closing else "")


@st.composite
def answers(draw) -> tuple[ToolForm, str, Result]:
    """An answer written by the rules, and what it says."""
    form = draw(st.sampled_from([HERMES, LLAMA3]))
    plain = st.text(st.characters(exclude_characters="<>{};", exclude_categories=("Cs",)), max_size=12)
    text, calls = draw(plain), []
    content, is_bare = text, form.is_bare and not text.strip(" \t\r\n")
    for number in range(draw(st.integers(0, 3))):
        name, arguments = draw(NAMES), draw(ARGUMENTS)
        words = draw(plain).strip(" \t\r\n")
        call = write_call(form, name, arguments, draw(WHITE))
        if is_bare and draw(st.booleans()):
            call = draw(st.sampled_from(["", ";", "; "] if number else [""])) + call.removeprefix(form.opening)
        content = content.rstrip(" \t\r\n")
        space = draw(WHITE)
        text += draw(WHITE) + call + space + words
        content += (space if content and words else "") + words
        calls.append((f"id{number}", name, arguments))
        is_bare = form.is_bare and not words
    return form, text, (content, calls)


@given(answers(), BORDERS)
def test_an_answer_says_what_was_written_into_it_however_it_is_cut(answer: tuple[ToolForm, str, Result], borders):
    form, text, expected = answer
    assert parse(form, cut(text, borders)) == expected


@settings(max_examples=400)
@given(st.sampled_from([HERMES, LLAMA3]), st.lists(FRAGMENTS, max_size=12).map("".join), BORDERS)
@example(HERMES, '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', [11])
@example(LLAMA3, '{"name": "f", "parameters": {}} ; {"name": "f", "parameters": {"a": tru }', [])
def test_any_text_gives_the_same_however_it_is_cut_and_loses_nothing(form: ToolForm, text: str, borders: list[int]):
    whole = parse(form, [text])
    assert parse(form, cut(text, borders)) == whole
    assert parse(form, list(text)) == whole
    check_nothing_is_lost(form, text)


def check_nothing_is_lost(form: ToolForm, text: str) -> None:
    """Read in order, all that lies between what the deltas say is white space and the frame of calls."""
    words = [form.opening, *([form.closing] if form.closing else []), "{", "}", ";"]
    keys = [r'"name"\s*:\s*"', rf'"\s*,\s*"{form.arguments_key}"\s*:']
    frame = re.compile("(?:" + "|".join([*map(re.escape, words), *keys, r"\s"]) + ")*")
    parser, at = ToolCallParser(form), 0
    for delta in [*(parser.feed(char) for char in text), parser.finish()]:
        for said in [delta.content, *(part for call in delta.calls for part in (call.name or "", call.arguments))]:
            found = text.index(said, at)
            assert frame.fullmatch(text, at, found), (said, text[at:found])
            at = found + len(said)
    assert frame.fullmatch(text, at), text[at:]


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        (HERMES, "2 < 3 and <tool", "2 < 3 and <tool"),
        (HERMES, "the <tool_call> tag", "the <tool_call> tag"),
        (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}'),  # no marker
        (HERMES, '<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu'),  # ends before it is a call
        (HERMES, '<tool_call>{"name": "f", "arguments": 3}', '<tool_call>{"name": "f", "arguments": 3}'),
        (HERMES, '<tool_call>{"arguments": {}, "name": "f"}', '<tool_call>{"arguments": {}, "name": "f"}'),
        (HERMES, "  \n", "  \n"),
        (LLAMA3, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}'),
        (LLAMA3, '{"answer": 42}', '{"answer": 42}'),
        (LLAMA3, 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}'),  # neither start nor tag
        (LLAMA3, '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")'),
    ],
)
def test_what_only_looks_like_a_call_is_content(form: ToolForm, text: str, content: str):
    for pieces in ([text], list(text)):
        assert parse(form, pieces) == (content, [])


def test_several_calls_and_texts_around_them():
    text = (
        "I'll look.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "time", "arguments": {}}\n</tool_call>\n\nDone.\n'
    )
    calls = [("id0", "weather", '{"city": "Rome"}'), ("id1", "time", "{}")]
    assert parse(HERMES, [text]) == ("I'll look.\n\nDone.\n", calls)
    text = '<|python_tag|>{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}'
    assert parse(LLAMA3, [text]) == ("", [("id0", "a", '{"x": 1}'), ("id1", "b", "{}")])


def test_arguments_are_passed_on_as_they_come():
    parser = ToolCallParser(HERMES)
    assert not parser.feed('Hm. <tool_call>{"name": "f", "argu').calls
    begun = parser.feed('ments": {"ci').calls
    assert [(call.index, call.name, call.arguments) for call in begun] == [(0, "f", '{"ci')]
    assert [call.arguments for call in parser.feed('ty": "R').calls] == ['ty": "R']
    assert not parser.is_whole
    assert [call.arguments for call in parser.feed('ome"}}</tool').calls] == ['ome"}']
    assert parser.is_whole


def test_only_what_may_begin_a_call_is_held_back():
    parser = ToolCallParser(HERMES)
    said = [parser.feed(piece).content for piece in ["one ", "two <to", "ol", "box", " <", "b>\n"]]
    assert said == ["one", " two", "", " <toolbox", "", " <b>"]
    parser = ToolCallParser(LLAMA3)
    assert [parser.feed(piece).content for piece in ['{"n', 'o": ', '{"name": ']] == ["", '{"no":', ' {"name":']


@pytest.mark.parametrize("ending", ["", "}", "}</tool_call>", "</tool_call>", "}\n</tool_call>\n"])
def test_a_call_needs_no_tidy_end(ending: str):
    assert parse(HERMES, ['<tool_call>{"name": "f", "arguments": {"a": 1}' + ending]) == (
        "",
        [("id0", "f", '{"a": 1}')],
    )


def test_arguments_that_break_off_or_break_stay_as_they_are():
    begun = '<tool_call>{"name": "f", "arguments": '
    for rest, content, arguments in [
        ('{"a": "Ro', "", '{"a": "Ro'),
        ('{"a": tru!}}</tool_call> bye', "!}}</tool_call> bye", '{"a": tru'),
        ('{"a": 1,}} bye', "}} bye", '{"a": 1,'),
    ]:
        parser = ToolCallParser(HERMES)
        parser.feed(begun + rest)
        assert not parser.is_whole
        assert parse(HERMES, list(begun + rest)) == (content, [("id0", "f", arguments)])
    parser = ToolCallParser(HERMES)
    parser.feed(begun + "{!" + begun + "{}}</tool_call>")
    assert parser.num_calls == 2 and not parser.is_whole


def test_every_call_has_an_id_of_its_own():
    parser = ToolCallParser(HERMES)
    ids = [call.id for call in parser.feed('<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 50).calls]
    assert len(set(ids)) == 50 and all(re.fullmatch("call_[0-9a-f]{24}", call_id or "") for call_id in ids)


@pytest.mark.parametrize("form", FORMS.values())
@pytest.mark.parametrize(
    "text", ["<tool_call>", "", '<tool_call>{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}']
)
def test_long_white_space_costs_no_more_than_its_length(form: ToolForm, text: str):
    began = time.process_time()
    assert parse(form, [text + " " * 100_000 + "x"])[0].endswith("x")
    assert time.process_time() - began < 2  # seconds; tried at every length it would be minutes


def first_object(text: str) -> int | None:
    """Where the object that the text begins with ends, by the standard library."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        value, end = json.JSONDecoder(parse_constant=refuse).raw_decode(text)
    except ValueError:
        return None
    return end if isinstance(value, dict) else None


@pytest.mark.parametrize(
    "scalar", ["tru", "nul", "-", "1.", "1e", "-.5", "01", "1e+", "truee", "+1", "NaN", "0x1", ".5"]
)
def test_a_scalar_that_is_none_is_broken(scalar: str):
    for end in ("}", ", ", " "):
        whole = JsonObject()
        assert whole.take(f'{{"a": {scalar}{end}') < len(f'{{"a": {scalar}{end}') and whole.is_broken


@settings(max_examples=400)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.booleans(), st.data())
def test_an_objects_end_is_the_standard_librarys(value: dict, ascii: bool, data: st.DataObject):
    text = json.dumps(value, ensure_ascii=ascii)
    for _ in range(data.draw(st.integers(0, 2))):  # damage
        at = data.draw(st.integers(0, len(text)))
        new = data.draw(st.sampled_from(list('{}[]",:\\0-.eEtfnu \n\x01x')))
        text = text[:at] + new + text[at + data.draw(st.integers(0, 1)) :]
    text += data.draw(st.sampled_from(["", "}", " ", "x"]))
    whole, pieces = JsonObject(), JsonObject()
    size = whole.take(text)
    assert sum(pieces.take(char) for char in text) == size
    assert (pieces.is_whole, pieces.is_broken) == (whole.is_whole, whole.is_broken)
    assert (size if whole.is_whole else None) == first_object(text)
