"""`response_format`, `structured_outputs` and `bad_words` of OpenAI's request bodies: what the answer must match.

What a schema may not hold is told when it is compiled (`Backend.prepare`), under the name it has in the body."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.constraints import KINDS, StructuredOutputs
from jaxserve.request import RequestError
from server.json_schema import BOOLEAN, SOME_TEXT, STRING, any_of, array_of, object_of
from server.json_types import Field, Json, boolean, quote, text, texts, wrong

FORMATS = ("text", "json_object", "json_schema")


def structured_outputs(name: str, value: Json) -> StructuredOutputs:
    given = _object(name, value, KINDS)
    checks = {"json": _schema, "regex": text, "choice": texts, "grammar": text, "json_object": boolean}
    return StructuredOutputs(**{key: checks[key](f"{name}.{key}", each) for key, each in given.items()})


def response_format(name: str, value: Json) -> StructuredOutputs | None:
    given = _object(name, value, ("type", "json_schema"))
    kind = given.get("type")
    if kind not in FORMATS:
        raise wrong(f"{name}.type", f"one of {', '.join(FORMATS)}", kind)
    if kind != "json_schema":
        if "json_schema" in given:
            raise RequestError(f"{name}.json_schema needs type: json_schema", field=f"{name}.json_schema")
        return StructuredOutputs(json_object=True, asked_as=name) if kind == "json_object" else None
    name = f"{name}.json_schema"
    inner = _object(name, given.get("json_schema"), ("name", "description", "schema", "strict"))
    for key in ("name", "description"):
        text(f"{name}.{key}", inner.get(key, ""))
    boolean(f"{name}.strict", inner.get("strict", True))
    if "schema" not in inner:
        raise RequestError(f"{name}.schema is missing", field=f"{name}.schema")
    return StructuredOutputs(json=_schema(f"{name}.schema", inner["schema"]), asked_as=f"{name}.schema")


def structured_of(values: Mapping[str, object]) -> StructuredOutputs | None:
    """What a body's two ways to ask for it come to."""
    here, there = values.get("structured_outputs"), values.get("response_format")
    if here is not None and there is not None:
        raise RequestError("response_format and structured_outputs exclude each other", field="response_format")
    found = there if here is None else here
    assert found is None or isinstance(found, StructuredOutputs)
    return found


def _object(name: str, value: Json, known: tuple[str, ...]) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    for key in value:
        if key not in known:
            field = f"{name}.{key if key.isidentifier() and len(key) <= 60 else quote(key)}"
            raise RequestError(f"{field} is not a field that this server supports", field=field)
    return {key: each for key, each in value.items() if each is not None}


def _schema(name: str, value: Json) -> str | dict:
    if not isinstance(value, dict | str):
        raise wrong(name, "a JSON schema: an object, or its text", value)
    return value


_SPECS: Mapping[str, Json] = {
    "json": any_of({"type": "object"}, SOME_TEXT),
    "regex": SOME_TEXT,
    "choice": array_of(SOME_TEXT, minItems=1),
    "grammar": SOME_TEXT,
    "json_object": {"const": True},
}
STRUCTURED: Mapping[str, Field] = {
    "structured_outputs": Field(structured_outputs, {**object_of(_SPECS), "minProperties": 1, "maxProperties": 1}),
    "bad_words": Field(texts, array_of({"type": "string", "pattern": r"\S"})),
}
RESPONSE_FORMAT = Field(
    response_format,
    any_of(
        object_of(type={"enum": ["text", "json_object"]}),
        object_of(
            type={"const": "json_schema"},
            json_schema=object_of(
                {"name": STRING, "description": STRING, "strict": BOOLEAN}, schema={"type": "object"}
            ),
        ),
    ),
)
