"""Thirty-two JSON schemas, no two of a kind: what people ask models for, so bounded that answers are short."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsonschema_rs

from jaxserve.llm import RequestOutput


def record(properties: dict, *, required: list[str] | None = None) -> dict:
    """An object of these properties, all of them required unless told otherwise, and no others."""
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def short(most: int = 12, **more) -> dict:
    return {"type": "string", "maxLength": most, **more}


def listed(items: dict, least: int, most: int) -> dict:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def whole(least: int, most: int) -> dict:
    return {"type": "integer", "minimum": least, "maximum": most}


POINT = record({"x": whole(-9, 9), "y": whole(-9, 9)})

SCHEMAS: dict[str, dict] = {
    "person": record({"name": short(), "age": whole(0, 120)}),
    "optional fields": record({"city": short(), "zip": short(5), "country": {"enum": ["FR", "JP"]}}, required=["city"]),
    "no field is required": record({"a": {"type": "boolean"}, "b": {"type": "boolean"}}, required=[]),
    "nested": record({"user": record({"id": whole(1, 99), "mail": record({"on": {"type": "boolean"}})})}),
    "list of texts": listed(short(8), 1, 4),
    "list of objects": listed(record({"sku": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, "n": whole(1, 9)}), 1, 3),
    "matrix": listed(listed({"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}, 2, 2), 2, 2),
    "tuple": {"type": "array", "prefixItems": [whole(0, 5), {"type": "boolean"}], "items": False, "minItems": 2},
    "enum of texts": {"enum": ["positive", "negative", "neutral"]},
    "enum of anything": {"enum": [0, 1.5, None, "two", [3], {"four": 4}]},
    "const": record({"version": {"const": "1.0"}, "ok": {"const": True}}),
    "any of": record({"value": {"anyOf": [whole(0, 9), short(4), {"type": "null"}]}}),
    "one of, told apart": {
        "oneOf": [
            record({"kind": {"const": "circle"}, "radius": whole(1, 9)}),
            record({"kind": {"const": "square"}, "side": whole(1, 9)}),
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 40}]},
    "references": record({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}) | {"$defs": {"point": POINT}},
    "recursion": {
        "$defs": {"node": record({"v": whole(0, 9), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})},
        "$ref": "#/$defs/node",
    },
    "several types": record({"id": {"type": ["integer", "null"], "minimum": 0, "maximum": 999}}),
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5, "multipleOf": 0.25},
    "multiple": record({"minutes": {"type": "integer", "multipleOf": 15, "minimum": 0, "maximum": 120}}),
    "text of a length": {"type": "string", "minLength": 3, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,5}-[0-9]{1,3}$"},
    "letters of the world": {"enum": ["Köln", "東京", "🫠", 'a "b"\n', "\\"]},
    "date": record({"born": {"type": "string", "format": "date"}}),
    "time stamp": record({"at": {"type": "string", "format": "date-time", "maxLength": 32}}),
    "uuid": record({"id": {"type": "string", "format": "uuid"}}),
    "address": record({"ip": {"type": "string", "format": "ipv4"}}),
    "map": {"type": "object", "additionalProperties": whole(0, 9), "minProperties": 1, "maxProperties": 2},
    "patterns of names": {
        "type": "object", "patternProperties": {"^x_[a-z]{1,3}$": whole(0, 9)}, "additionalProperties": False,
        "maxProperties": 3,
    },
    "deep lists": listed(listed(listed(whole(0, 9), 0, 2), 0, 2), 1, 2),
    "a call": record(
        {"name": {"const": "weather"}, "arguments": record({"city": {"enum": ["Rome", "Oslo"]}, "days": whole(1, 14)})}
    ),
}  # fmt: skip


def check_valid(outputs: Sequence[RequestOutput]) -> None:
    """outputs: of the schemas, in their order.  Each came to its own end and is what its schema asks for."""
    for (name, schema), output in zip(SCHEMAS.items(), outputs, strict=True):
        assert (output.finish_reason, output.stop_reason) == ("stop", None), (name, output.text)
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        assert validator.is_valid(json.loads(output.text)), (name, output.text)
