"""What an answer must match, as OpenAI and vLLM say it: translated, or refused by the name it has in the body."""

from __future__ import annotations

import json

import pytest

from jaxserve.constraints import StructuredOutputs
from jaxserve.text.structured import Grammars
from tests.server.stub import StubTokenizer
from tests.server.test_openai_schema import ask, refusal

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_every_form_comes_through(kind: str) -> None:
    for given, wanted in [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            StructuredOutputs(json=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, StructuredOutputs(choice=["yes", "no"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputs(grammar='start: "a"')),
        ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
    ]:
        assert ask(kind, **given).params.structured_outputs == wanted


def test_properties_keep_their_order() -> None:
    params = ask(structured_outputs={"json": SCHEMA}).params
    assert params.structured_outputs.source == json.dumps(SCHEMA, separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": "yes", "schema": {}}}},
            "response_format.json_schema.strict",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x" * 1025]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
    ],
)
def test_a_wrong_form_is_refused_by_name(fields: dict, field: str) -> None:
    assert refusal("chat", **fields).field == field


def test_what_the_parser_refuses_has_the_name_it_has_in_the_body() -> None:
    schema = {"type": "array", "uniqueItems": True}
    params = ask("chat", response_format={"type": "json_schema", "json_schema": {"schema": schema}}).params
    grammars = Grammars(StubTokenizer(), vocab=300)
    try:
        with pytest.raises(Exception, match=r"response_format\.json_schema\.schema cannot be used: .*uniqueItems"):
            grammars.mask_factory(params)
    finally:
        grammars.close()
