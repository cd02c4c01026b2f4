"""JSON schemas, put together: what tells of a body's fields and of an answer's.  Checks nothing itself."""

from __future__ import annotations

from collections.abc import Mapping

from server.json_types import Json

Schema = Mapping[str, Json]

STRING, BOOLEAN, NUMBER, INTEGER = ({"type": kind} for kind in ("string", "boolean", "number", "integer"))
SOME_TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}


def object_of(optional: Mapping[str, Schema] | None = None, **properties: Schema) -> dict[str, Json]:
    """Nothing that is not told here; `optional` need not stand there."""
    every = {name: dict(schema) for name, schema in {**properties, **(optional or {})}.items()}
    return {"type": "object", "properties": every, "required": list(properties), "additionalProperties": False}


def array_of(items: Schema, **limits: Json) -> dict[str, Json]:
    """limits: minItems, maxItems."""
    return {"type": "array", **limits, "items": dict(items)}


def any_of(*schemas: Schema) -> dict[str, Json]:
    return {"anyOf": [dict(schema) for schema in schemas]}


def nullable(schema: Schema) -> dict[str, Json]:
    return any_of(schema, {"type": "null"})
