"""A mask allows an id if and only if some answer goes on with it; whatever cannot be compiled is refused by name, in time,
and harms nothing else."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.constraints import MAX_SPEC_BYTES, StructuredOutputs
from jaxserve.request import MaskError, RequestError, SamplingParams, TokenMask
from jaxserve.text.masks import MaskFiller
from jaxserve.text.structured import Grammars
from jaxserve.text.vocabulary import Vocabulary

BYTES = [bytes([byte]) for byte in range(256)]
WORDS = [b"a", b"b", b"c", b"ab", b"ba", b"abc", b"cc", b"", b" a", b"<|x|>", b"<|end|>", b"<|stop|>"]
END, STOP = WORDS.index(b"<|end|>"), WORDS.index(b"<|stop|>")
PADDING = 21  # ids that only the model has


class Longest:
    """Encodes with the longest token each time."""

    def __init__(self, table: Sequence[bytes]):
        self._ids = {token: token_id for token_id, token in enumerate(table) if token}

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        rest, ids = text.encode(), []
        while rest:
            size = next((size for size in range(len(rest), 0, -1) if rest[:size] in self._ids), 0)
            ids += [self._ids[rest[:size]]] if size else []  # what no token spells is dropped
            rest = rest[size or 1 :]
        return ids

    def save(self, folder) -> dict[str, object]:
        raise NotImplementedError


def vocabulary(table: Sequence[bytes]) -> Vocabulary:
    """The last three tokens are <|x|>, <|end|> and <|stop|>; the last two end a sequence."""
    size = len(table)
    special = {"<|x|>": size - 3, "<|end|>": size - 2, "<|stop|>": size - 1}
    return Vocabulary(
        encoder=Longest(table[:-3]), table=table, bos_id=None, eos_ids=(size - 2, size - 1), special_tokens=special,
        adds_bos=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Iterator[Grammars]:
    grammars = Grammars(vocabulary(WORDS), vocab=len(WORDS) + PADDING)
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def by_bytes() -> Iterator[Grammars]:
    grammars = Grammars(vocabulary([*BYTES, b'{"', b'": ', b", ", b"<|x|>", b"<|end|>", b"<|stop|>"]), vocab=262)
    yield grammars
    grammars.close()


def constrained(**fields) -> SamplingParams:
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__slots__}
    return SamplingParams(structured_outputs=StructuredOutputs(**fields) if fields else None, **sampling)


def ids_in(words: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")).tolist()


def mask_of(grammars: Grammars, params: SamplingParams) -> TokenMask:
    factory = grammars.mask_factory(params)
    assert factory is not None
    return factory()


LANGUAGES: dict[str, tuple[dict, str, int]] = {  # spec, the same as Python's re, length of the longest answer looked at
    "regex": ({"regex": "(ab|c)+a?"}, "(ab|c)+a?", 7),
    "optional": ({"regex": "a{0,3}(bc)?"}, "a{0,3}(bc)?", 7),
    "choice": ({"choice": ["abc", "ab", "cc", "ba"]}, "abc|ab|cc|ba", 7),
    "grammar": ({"grammar": 'start: x ("b" x)*\nx: "a"+ | "c"'}, "(a+|c)(b(a+|c))*", 7),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_an_id_is_allowed_if_and_only_if_some_answer_goes_on_with_it(small: Grammars, name: str) -> None:
    spec, pattern, longest = LANGUAGES[name]
    texts = ["".join(chars) for n in range(longest + 1) for chars in itertools.product("abc", repeat=n)]
    answers = [text.encode() for text in texts if re.fullmatch(pattern, text)]
    reached = {b"": mask_of(small, constrained(**spec))}
    looked_at = 0
    while reached:
        text, mask = reached.popitem()
        allowed = ids_in(mask.words())
        wanted = {
            token_id
            for token_id, token in enumerate(WORDS)
            if token_id < END and token and any(answer.startswith(text + token) for answer in answers)
        }
        wanted |= {END, STOP} if text in answers else set()
        assert set(allowed) == wanted, (text, [WORDS[i] for i in allowed])
        looked_at += 1
        for token_id in wanted - {END, STOP}:
            if len(text) + len(WORDS[token_id]) + 4 <= longest:  # every state up to there has its way out within reach
                after = mask_of(small, constrained(**spec))
                after.advance(small_ids(text))
                after.advance([token_id])
                reached[text + WORDS[token_id]] = after
    assert looked_at >= 5


def small_ids(text: bytes) -> list[int]:
    return [WORDS.index(bytes([byte])) for byte in text]


def write(mask: TokenMask, rng: np.random.Generator, most: int = 4000) -> bytes:
    """A random answer: any allowed byte, the end a little more often than not."""
    text = b""
    for _ in range(most):
        allowed = ids_in(mask.words())
        if 260 in allowed and (len(allowed) == 2 or rng.random() < 0.5):
            return text
        plain = [i for i in allowed if i < 260 and (i < 128 or len(allowed) < 40)]
        weights = np.array([40.0 if i in tuple(b'"}]') else 1.0 for i in plain])
        token_id = int(rng.choice(plain, p=weights / weights.sum()))
        mask.advance([token_id])
        text += [*BYTES, b'{"', b'": ', b", ", b"<|x|>"][token_id]
    raise AssertionError(f"no end within {most} tokens: {text[:200]!r}")


SCHEMAS: list[dict] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
    {"type": "string", "pattern": "^[a-f]{2,5}-[0-9]+$"},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -3, "maximum": 1200},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    {"enum": [1, "two", None, {"three": [3]}]},
    {"const": {"x": [1, 2.5, "é"]}},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 40}]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"$defs": {"leaf": {"type": "object", "properties": {"n": {"enum": [0, 1]}}, "required": ["n"],
                        "additionalProperties": False}}, "type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
    {"type": "object", "properties": {"k": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}},
     "required": ["k"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_every_answer_is_valid_by_its_schema(by_bytes: Grammars, number: int) -> None:
    schema = SCHEMAS[number]
    factory = by_bytes.mask_factory(constrained(json=schema))
    assert factory is not None
    for seed in range(4):
        text = write(factory(), np.random.default_rng(seed))
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text


def test_json_object_is_any_object_and_nothing_else(by_bytes: Grammars) -> None:
    for seed in range(4):
        text = write(mask_of(by_bytes, constrained(json_object=True)), np.random.default_rng(seed))
        assert isinstance(json.loads(text), dict)


def test_blanks_between_json_tokens_come_to_an_end(by_bytes: Grammars) -> None:
    mask = mask_of(by_bytes, constrained(json_object=True))
    mask.advance(list(b"{\n" + b" " * 32))
    assert not set(ids_in(mask.words())) & set(b" \n\t\r")


def test_choices_may_hold_any_character(by_bytes: Grammars) -> None:
    texts = ['é🫠"\\\n\x01\x7f', "</s>", "a/b {x}", "<|x|>", "%json", " 'q' "]
    for text in texts:
        mask = mask_of(by_bytes, constrained(choice=texts))
        for byte in text.encode():
            assert byte in ids_in(mask.words())
            mask.advance([byte])
        assert ids_in(mask.words()) == [260, 261]


FEW_WORDS = [WORDS.index(token) for token in (b"a", b"b", b"c", b"ab", b"ba", b"abc", b"cc", b"<|end|>")]


@given(
    spec=st.sampled_from([*(spec for spec, _, _ in LANGUAGES.values()), {}]),
    bad=st.lists(st.text("abc ", min_size=1).filter(str.strip), max_size=3),
    walk=st.lists(st.integers(0, 99), max_size=4),
    drafts=st.lists(st.sampled_from(FEW_WORDS), min_size=1, max_size=4),
)
def test_masks_ahead_are_those_of_going_there(small: Grammars, spec: dict, bad: list[str], walk, drafts) -> None:
    """Position by position, up to the first draft that is refused; and nothing of it stays."""
    if not spec and not bad:
        bad = ["ab"]
    factory = small.mask_factory(constrained(**spec, bad_words=bad))
    assert factory is not None
    mask, way = factory(), []
    for pick in walk:
        try:
            plain = [token_id for token_id in ids_in(mask.words()) if token_id < len(WORDS)]
        except MaskError:
            break
        token_id = plain[pick % len(plain)]
        if token_id in (END, STOP):
            break
        way.append(token_id)
        mask.advance([token_id])
    filler = MaskFiller(2)
    (ahead,) = filler.fill([(mask, drafts)])
    (now,) = filler.fill([(mask, ())])
    if isinstance(ahead, MaskError):
        assert isinstance(now, MaskError)
        return
    assert (ahead[0] == now[0]).all(), "looking ahead moved the mask"
    for position in range(1 + len(drafts)):
        at = factory()
        try:
            at.advance([*way, *drafts[:position]])
            wanted = ids_in(at.words())
        except MaskError:
            wanted = []
        assert ids_in(ahead[position].tobytes()) == wanted
        if position == len(drafts) or drafts[position] not in wanted or drafts[position] == END:
            break
    closed = position + 1 if position < len(drafts) and drafts[position] != END else len(ahead)
    assert not ahead[closed:].any()


def test_a_mask_rolls_back(small: Grammars) -> None:
    mask = mask_of(small, constrained(regex="(ab|c)+a?", bad_words=["cab"]))
    mask.advance(small_ids(b"c"))
    before = mask.words()
    mask.advance(small_ids(b"aba"))
    mask.rollback(3)
    assert mask.words() == before
    mask.advance(small_ids(b"ab"))
    assert mask.words() != before


def test_the_last_token_of_a_bad_word_is_never_drawn(small: Grammars) -> None:
    """Each way to write it, at the start, within, and after a blank; vLLM's own example of the rule."""
    mask = mask_of(small, constrained(bad_words=["abca", "b", "a"]))
    assert {"a", "b", " a"}.isdisjoint(WORDS[i].decode() for i in ids_in(mask.words()) if i < len(WORDS))
    mask = mask_of(small, constrained(bad_words=["abca"]))  # tokens abc, a; or blank a ...
    assert WORDS.index(b"a") in ids_in(mask.words())
    mask.advance([WORDS.index(b"abc")])
    assert WORDS.index(b"a") not in ids_in(mask.words())
    mask.advance([WORDS.index(b"b")])
    assert WORDS.index(b"a") in ids_in(mask.words())


def test_ids_that_only_the_model_has_are_never_allowed_by_a_grammar(small: Grammars) -> None:
    assert max(ids_in(mask_of(small, constrained(regex="[^x]*")).words())) < len(WORDS)
    unbound = ids_in(mask_of(small, constrained(bad_words=["a"])).words())
    assert len(WORDS) + PADDING - 1 in unbound  # a plain row may draw them as well


def test_a_control_token_is_no_text(by_bytes: Grammars) -> None:
    assert not {259, 260, 261} & set(ids_in(mask_of(by_bytes, constrained(choice=["<|x|>", "<|end|>"])).words()))


def test_ignore_eos_and_min_tokens_hold_the_end_back_while_the_answer_may_go_on(small: Grammars) -> None:
    for fields in ({"ignore_eos": True}, {"min_tokens": 3}):
        mask = mask_of(small, constrained(regex="a{1,2}", **fields))
        mask.advance(small_ids(b"a"))
        assert ids_in(mask.words()) == small_ids(b"a")
        mask.advance(small_ids(b"a"))
        assert ids_in(mask.words()) == [END, STOP]
    mask = mask_of(small, constrained(regex="a*", min_tokens=2, stop_token_ids=[WORDS.index(b"ab")]))
    mask.advance(small_ids(b"a"))
    assert not {END, STOP} & set(ids_in(mask.words()))
    mask.advance(small_ids(b"a"))
    assert {END, STOP} < set(ids_in(mask.words()))


def test_rules_that_leave_nothing_are_told(small: Grammars) -> None:
    with pytest.raises(MaskError, match="no token is left"):
        mask_of(small, constrained(choice=["a"], bad_words=["a"])).words()
    with pytest.raises(RequestError, match="banned_token_ids leaves no end-of-sequence id"):
        mask_of(small, constrained(choice=["a"], banned_token_ids=[END, STOP]))


def test_a_parser_that_gives_up_ends_its_row_and_a_draft_that_breaks_it_does_not(small: Grammars) -> None:
    """This grammar's rows grow with the text until the parser's limit."""
    factory = small.mask_factory(constrained(grammar='start: ("a"{1,1000}){1,1000}'))
    assert factory is not None

    def end(length: int) -> str | None:
        mask = factory()
        try:
            mask.advance(small_ids(b"a") * length)
            mask.words()
        except MaskError as error:
            return error.message

    length = next(length for length in range(200) if end(length))
    assert "gave up" in end(length)
    filler, near = MaskFiller(2), factory()
    near.advance(small_ids(b"a") * (length - 2))
    neighbour = mask_of(small, constrained(regex="a+"))
    ahead, plain = filler.fill([(near, small_ids(b"aaaa")), (neighbour, small_ids(b"aaaa"))])
    assert ids_in(ahead[0].tobytes()) and not ahead[1:].any()
    assert plain.all(axis=0).any()
    near.advance(small_ids(b"a"))
    assert ids_in(near.words())


REFUSED: list[tuple[dict, str]] = [
    ({}, "exactly one of json, regex"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"regex": ""}, "structured_outputs.regex must hold text"),
    ({"regex": "(a"}, "structured_outputs.regex cannot be used.*unclosed group"),
    ({"regex": "(?=a)b"}, "look-ahead"),
    ({"regex": "\ud800"}, "lone surrogate"),
    ({"regex": "a" * (MAX_SPEC_BYTES + 1)}, f"65537 bytes, this engine takes {MAX_SPEC_BYTES}"),
    ({"regex": "(((a{1000}){1000}){1000})"}, "structured_outputs.regex cannot be used"),
    ({"choice": []}, "structured_outputs.choice must be a list"),
    ({"choice": "ab"}, "structured_outputs.choice must be a list"),
    ({"choice": ["a", ""]}, "structured_outputs.choice must hold text"),
    ({"grammar": "start: nothing"}, "structured_outputs.grammar cannot be used.*unknown name"),
    ({"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000}, "too deeply nested"),
    ({"json": "{"}, "structured_outputs.json is no JSON"),
    ({"json": "[]"}, "structured_outputs.json must be a JSON schema"),
    ({"json": {"a": {1, 2}}}, "structured_outputs.json is no JSON"),
    ({"json": {"type": "strin"}}, "Invalid type: strin"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
    ({"json": {"if": {}, "then": {}}}, r'"if", "then"'),
    ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf"),
    ({"json": {"type": "string", "format": "zip code"}}, "Unknown format"),
    ({"json": {"$ref": "http://example.com/x"}}, "example.com"),
    ({"json": {"type": "object", "properties": {f"p{i}": {} for i in range(2400)}}}, "2000"),
    ({"json_object": 1}, "json_object must be true"),
    ({"grammar": 'start: "a" start'}, "structured_outputs.grammar cannot be used"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "no text satisf"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_compiled_is_refused_by_name(by_bytes: Grammars, spec: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        by_bytes.mask_factory(SamplingParams(structured_outputs=StructuredOutputs(**spec)))
    assert caught.value.field in ("structured_outputs", f"structured_outputs.{next(iter(spec), '')}")


def test_a_schema_too_deep_to_read_is_refused() -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.json"):
        StructuredOutputs(json='{"items":' * 20_000 + "{}" + "}" * 20_000)


CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3500)) + 'r3500: "a"\n'
HARMFUL: dict[str, Callable[[], StructuredOutputs]] = {
    "slow": lambda: StructuredOutputs(json={"type": "integer", "multipleOf": 999983}),  # eight seconds, 400 MB
    "deep": lambda: StructuredOutputs(grammar=CHAIN),  # overflows the stack
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_grammar_is_refused_in_time_and_the_next_one_compiles(by_bytes: Grammars, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match="the parser needs more than it is given"):
        by_bytes.mask_factory(SamplingParams(structured_outputs=HARMFUL[name]()))
    assert time.monotonic() - began < 10
    assert ids_in(mask_of(by_bytes, constrained(regex="xy")).words()) == [ord("x")]


def test_one_grammar_compiles_once(by_bytes: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    params = constrained(regex="once+")
    by_bytes.mask_factory(params)
    monkeypatch.setattr(by_bytes._trial, "refusal", lambda grammar: pytest.fail("compiled again"))
    by_bytes.mask_factory(constrained(regex="once+", temperature=0))
