"""The grammar of answers with tools: text is free, a call that has begun obeys its tool's schema, and the parser finds
just the calls that the grammar let through."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxserve.request import RequestError
from jaxserve.text.tool_calls import ToolCallParser
from jaxserve.text.tool_forms import FORMS, HERMES, LLAMA3, ToolForm
from jaxserve.text.tool_grammar import tool_grammar
from jaxserve.text.tools import Tool, ToolChoice, choice_of, tools_of
from jaxserve.text.vocabulary import Vocabulary
from tests.text.test_chat import Bytes

# Tokens that reach over the borders between the frame of a call and its parts, as real vocabularies have them.
MERGES = [
    "<tool_call>",
    "</tool_call>",
    ">{",
    '{"',
    '": "',
    '": {"',
    '", "',
    '{"name',
    "}}",
    "}}\n",
    "}}</",
    "arg",
    "uments",
]
EOS = "<|end|>"


def vocabulary(*markers: str) -> Vocabulary:
    """Bytes, merges, then control tokens: the markers, one that means nothing here, and the end of text."""
    plain = [bytes([i]) for i in range(256)] + [text.encode() for text in MERGES]
    special = {text: len(plain) + i for i, text in enumerate([*markers, "<|other|>", EOS])}
    return Vocabulary(
        encoder=Bytes(),
        table=[*plain, *(text.encode() for text in special)],
        bos_id=None,
        eos_ids=(special[EOS],),
        special_tokens=special,
        adds_bos=False,
    )


@dataclass
class Source:
    """What llguidance asks of a tokenizer."""

    tokens: Sequence[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def matcher(grammar: str, tokenizer: Vocabulary) -> LLMatcher:
    source = Source(tokenizer.table, sorted(tokenizer.special_ids), tokenizer.eos_ids[0])
    made = LLMatcher(LLTokenizer(TokenizerWrapper(source), slices=[]), LLMatcher.grammar_from_lark(grammar))
    assert not made.is_error(), made.get_error()
    return made


HERMES_MARKERS = ("<tool_call>", "</tool_call>")
KINDS = [(HERMES, ()), (HERMES, HERMES_MARKERS), (LLAMA3, ()), (LLAMA3, ("<|python_tag|>",))]
KIND_NAMES = ["hermes-text", "hermes-tokens", "llama3-text", "llama3-tokens"]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"node": {"$ref": "#/$defs/node"}},
    "required": ["node"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}}},
}


def functions(**schemas: dict | None) -> tuple[Tool, ...]:
    made = [{"name": name} | ({"parameters": schema} if schema else {}) for name, schema in schemas.items()]
    return tools_of([{"type": "function", "function": function} for function in made])


TOOLS = functions(weather=WEATHER, tree=TREE, now=None)
AUTO, NONE, REQUIRED = ToolChoice(mode="auto"), ToolChoice(mode="none"), ToolChoice(mode="required")
NAMED = ToolChoice(mode="required", name="now")


def written(form: ToolForm, name: str, arguments: str, *, bare: bool = False) -> str:
    opening = "" if bare else f"{form.opening}\n" if form.closing else form.opening
    closing = f"\n{form.closing}" if form.closing else ""
    return f'{opening}{{"name": "{name}", "{form.arguments_key}": {arguments}}}{closing}'


def accepts(grammar: str, tokenizer: Vocabulary, text: str) -> bool:
    """Whether the whole text, its control tokens as such, may be an answer."""
    ids = [i for part in tokenizer.split_special(text) for i in ([part] if isinstance(part, int) else part.encode())]
    made = matcher(grammar, tokenizer)
    return made.validate_tokens(ids) == len(ids) and made.consume_tokens(ids) and made.is_accepting()


HERMES_CALL = written(HERMES, "weather", '{"city": "Rome"}')
HERMES_NOW = written(HERMES, "now", "{}")
LLAMA_CALL = written(LLAMA3, "weather", '{"city": "Rome", "days": 7}', bare=True)
LLAMA_NOW = written(LLAMA3, "now", "{}", bare=True)


@pytest.mark.parametrize("markers", [(), HERMES_MARKERS])
@pytest.mark.parametrize(
    ("choice", "parallel", "right", "wrong"),
    [
        (
            AUTO,
            True,
            ["", 'Hi {"name": "x"} < <tool', HERMES_CALL, f"So:\n{HERMES_CALL}\n{HERMES_NOW} done", "a<|other|>b"],
            [
                HERMES_CALL[:-1],
                HERMES_CALL.replace("Rome", "Oslo"),
                HERMES_CALL.replace("weather", "wether"),
                "<tool_call>x",
            ],
        ),
        (AUTO, False, ["", HERMES_CALL, f"a {HERMES_CALL} b"], [f"{HERMES_CALL}\n{HERMES_NOW}"]),
        (NONE, True, ["", "Hi <tool_call", '{"name": "now"'], [HERMES_CALL, "<tool_call>"]),
        (
            REQUIRED,
            True,
            [HERMES_CALL, f"{HERMES_CALL}\n{HERMES_NOW}"],
            ["", "Hi", f"Hi {HERMES_CALL}", f"{HERMES_NOW} x"],
        ),
        (REQUIRED, False, [HERMES_CALL], ["", f"{HERMES_CALL}\n{HERMES_NOW}"]),
        (NAMED, True, [HERMES_NOW], ["", HERMES_CALL, f"{HERMES_NOW}\n{HERMES_NOW}"]),
    ],
)
def test_hermes_answers(
    choice: ToolChoice, parallel: bool, right: list[str], wrong: list[str], markers: tuple[str, ...]
):
    tokenizer = vocabulary(*markers)
    grammar = tool_grammar(HERMES, tokenizer, TOOLS, choice, parallel=parallel)
    assert [text for text in right if not accepts(grammar, tokenizer, text)] == []
    assert [text for text in wrong if accepts(grammar, tokenizer, text)] == []


@pytest.mark.parametrize("markers", [(), ("<|python_tag|>",)])
@pytest.mark.parametrize(
    ("choice", "right", "wrong"),
    [
        (
            AUTO,
            ["", "Hi", '{"answer": 3}', 'So {"name": "x"}', LLAMA_CALL, f"\n{LLAMA_NOW}", "a<|other|>b"],
            ['{"name": "Ann"}', LLAMA_CALL.replace("7", "8"), f"{LLAMA_NOW}; {LLAMA_NOW}", f"{LLAMA_NOW} x"],
        ),
        (NONE, ["", "Hi", 'So {"name": "x"}'], [LLAMA_CALL, '{"name": "Ann"}', "<|python_tag|>"]),
        (REQUIRED, [LLAMA_CALL, LLAMA_NOW], ["", "Hi", f"Hi {LLAMA_CALL}"]),
        (NAMED, [LLAMA_NOW], ["", LLAMA_CALL]),
    ],
)
def test_llama_answers(choice: ToolChoice, right: list[str], wrong: list[str], markers: tuple[str, ...]):
    tokenizer = vocabulary(*markers)
    grammar = tool_grammar(LLAMA3, tokenizer, TOOLS, choice)
    assert [text for text in right if not accepts(grammar, tokenizer, text)] == []
    assert [text for text in wrong if accepts(grammar, tokenizer, text)] == []
    tagged = f"Hm. {written(LLAMA3, 'now', '{}')}"
    assert accepts(grammar, tokenizer, tagged) == (choice is AUTO and bool(markers))


def test_tokens_may_reach_over_the_borders_of_a_call():
    tokenizer = vocabulary()
    pieces = ["Hi <tool_call", ">{", '"name', '": "', "now", '", "', "arg", "uments", '": ', "{", "}}", "</tool_call>"]
    ids = [i for text in pieces for i in ([256 + MERGES.index(text)] if text in MERGES else text.encode())]
    made = matcher(tool_grammar(HERMES, tokenizer, TOOLS, AUTO), tokenizer)
    assert made.consume_tokens(ids) and made.is_accepting()


def allowed(made: LLMatcher, tokenizer: Vocabulary) -> list[int]:
    words = np.frombuffer(made.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(words, bitorder="little")[: tokenizer.vocab_size]).tolist()


def wander(made: LLMatcher, tokenizer: Vocabulary, rng: random.Random, steps: int) -> Iterable[int]:
    """Any allowed token, one like the other, but the rarer the longer: markers and ends come up now and then."""
    eos = tokenizer.eos_ids[0]
    for step in range(steps):
        ids = allowed(made, tokenizer)
        rare = [i for i in ids if i >= 256]
        token_id = eos if step > steps // 2 and eos in ids else rng.choice(rare if rare and rng.random() < 0.2 else ids)
        if token_id == eos:
            return
        assert made.consume_token(token_id)
        yield token_id


@pytest.mark.parametrize(("form", "markers"), KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("mode", ["auto", "required", "named"])
def test_whatever_a_model_draws_its_calls_are_whole_and_valid(form: ToolForm, markers: tuple[str, ...], mode: str):
    tokenizer, rng = vocabulary(*markers), random.Random(f"{form.name}{markers}{mode}")
    choice = {"auto": AUTO, "required": REQUIRED, "named": ToolChoice(mode="required", name="weather")}[mode]
    start = matcher(tool_grammar(form, tokenizer, TOOLS, choice), tokenizer)
    checks = {tool.name: jsonschema_rs.validator_for(dict(tool.parameters)) for tool in TOOLS}
    ended = found = 0
    for _ in range(12):
        made, parser, calls = start.deep_copy(), ToolCallParser(form), []
        shown = form.marker_ids(tokenizer)
        for token_id in wander(made, tokenizer, rng, 160):
            if token_id in shown or token_id not in tokenizer.special_ids:
                deltas = parser.feed(tokenizer.token_bytes(token_id).decode("latin-1")).calls
                calls += [["", ""] for delta in deltas if delta.name]
                for delta in deltas:
                    calls[-1] = [calls[-1][0] or delta.name, calls[-1][1] + delta.arguments]
        if not made.is_accepting():
            continue
        ended += 1
        found += len(calls)
        assert parser.is_whole == bool(calls)
        for name, arguments in calls:
            checks[name].validate(json.loads(arguments.encode("latin-1")))
    assert ended >= 8 and (found >= ended or mode == "auto")


@pytest.mark.parametrize(("form", "markers"), KINDS, ids=KIND_NAMES)
def test_drafts_can_be_taken_back(form: ToolForm, markers: tuple[str, ...]):
    tokenizer = vocabulary(*markers)
    made = matcher(tool_grammar(form, tokenizer, TOOLS, AUTO), tokenizer)
    text = written(form, "weather", '{"city": "Rome"}', bare=form is LLAMA3)
    ids = [i for part in tokenizer.split_special(text) for i in ([part] if isinstance(part, int) else part.encode())]
    masks = []
    for token_id in ids:
        masks.append(made.compute_bitmask())
        assert made.consume_token(token_id)
    for mask in reversed(masks):
        assert made.rollback(1) and made.compute_bitmask() == mask


def test_only_a_strict_tool_is_refused_for_a_keyword_that_cannot_be_held_to():
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, True):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        grammar = tool_grammar(HERMES, vocabulary(), tools_of([tool]), AUTO)
        assert bool(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))) == strict


FUNCTION = {"name": "f"}


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("x", "tools must be a list of at least one function"),
        ([], "tools must be a list of at least one function"),
        (
            [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)],
            "129 entries, this server takes 128",
        ),
        (["f"], r"tools\[0\] must be an object"),
        ([{"type": "custom", "custom": {}}], r"tools\[0\].custom is not a field"),
        ([{"type": "custom"}], r"tools\[0\].type must be 'function', got 'custom'"),
        ([{"type": "function"}], r"tools\[0\].function must be an object"),
        ([{"type": "function", "function": {}}], r"tools\[0\].function.name must be 1 to 64"),
        ([{"type": "function", "function": {"name": "a b"}}], r"function.name must be .* got 'a b'"),
        ([{"type": "function", "function": {"name": "f" * 65}}], "function.name must be"),
        ([{"type": "function", "function": FUNCTION | {"description": 1}}], "function.description must be a text"),
        ([{"type": "function", "function": FUNCTION | {"strict": "yes"}}], "function.strict must be true or false"),
        ([{"type": "function", "function": FUNCTION | {"parameters": []}}], "must be a JSON schema of type 'object'"),
        (
            [{"type": "function", "function": FUNCTION | {"parameters": {"type": "string"}}}],
            "must be a JSON schema of type",
        ),
        ([{"type": "function", "function": FUNCTION | {"returns": {}}}], r"tools\[0\].function.returns is not a field"),
        ([{"type": "function", "function": FUNCTION}] * 2, "two functions with the name 'f'"),
        ([{"type": "function", "function": {"name": "\ud800"}}], "lone surrogate"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools: object, reason: str):
    with pytest.raises(RequestError, match=reason) as caught:
        tools_of(tools)
    assert caught.value.field == "tools"


def test_tools_are_shown_to_the_model_as_they_were_given_without_what_is_null():
    function = {"name": "f", "description": "d", "parameters": {"properties": {"b": {}, "a": {}}}}
    (tool,) = tools_of([{"type": "function", "function": function | {"strict": None}}])
    assert json.dumps(tool.spec) == json.dumps({"type": "function", "function": function})
    assert tool.parameters == {"type": "object", "properties": {"b": {}, "a": {}}} and not tool.is_strict


def test_the_choices():
    assert choice_of(None, TOOLS) == choice_of("auto", TOOLS) == AUTO
    assert choice_of("none", TOOLS) == NONE and choice_of("required", TOOLS) == REQUIRED
    assert choice_of({"type": "function", "function": {"name": "now"}}, TOOLS) == NAMED


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("any", "tool_choice must be"),
        (3, "tool_choice must be"),
        ({"type": "function"}, "tool_choice must be"),
        ({"type": "function", "function": {"name": "now", "x": 1}}, "tool_choice must be"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice must be"),
        ({"type": "function", "function": {"name": "later"}}, "'later', which is not among tools"),
    ],
)
def test_wrong_choices_are_refused_by_name(value, reason: str):
    with pytest.raises(RequestError, match=reason) as caught:
        choice_of(value, TOOLS)
    assert caught.value.field == "tool_choice"


def test_every_form_and_choice_makes_a_grammar():
    for form, markers, choice, parallel in itertools.product(
        FORMS.values(), [(), HERMES_MARKERS], [AUTO, NONE, REQUIRED, NAMED], [True, False]
    ):
        matcher(tool_grammar(form, vocabulary(*markers), TOOLS, choice, parallel=parallel), vocabulary(*markers))
