"""Calls of the service as any client might make them: strategies derived from the proto's own descriptors.

A message holds some of its fields, each with a value that would do or with a hostile one of its type; a call's body may
be damaged bytes of such a message, or any bytes at all."""

from __future__ import annotations

import json
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from server.pb.jaxserve.v1 import generation_pb2 as pb
from tests.tiny_model import VOCAB

METHODS: tuple[MethodDescriptor, ...] = tuple(pb.DESCRIPTOR.services_by_name["Generation"].methods)
PATIENCE = 30.0  # seconds: a call that takes longer hangs

# What would do for a field of this name; the others have small values of their type.
TOKEN_IDS = st.integers(0, VOCAB - 1)
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])
TOOL_CALLS = json.dumps([{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}])
PLAUSIBLE: dict[str, st.SearchStrategy] = {
    "id": st.sampled_from(["", "a", "b", "ü"]),  # few, so that calls meet
    "ids": TOKEN_IDS,
    "token_ids": TOKEN_IDS,
    "stop_token_ids": TOKEN_IDS,
    "allowed_token_ids": TOKEN_IDS,
    "banned_token_ids": TOKEN_IDS,
    "key": TOKEN_IDS,  # of logit_bias
    "role": st.sampled_from(["system", "user", "assistant", "tool"]),
    "tools": st.just(TOOLS),
    "tool_calls": st.just(TOOL_CALLS),
    "json": st.just(SCHEMA),
    "regex": st.sampled_from(["[ab]{3}", "x?", "(a|b)*c"]),
    "grammar": st.just('start: "a" | "b" start'),
    "max_tokens": st.integers(0, 12),
    "n": st.integers(1, 3),
}
LARGEST = {
    FieldDescriptor.CPPTYPE_INT32: 2**31 - 1,
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_INT64: 2**63 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
}
UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)


@dataclass(frozen=True)
class Call:
    method: MethodDescriptor
    body: bytes
    timeout: float  # seconds
    is_left: bool  # by its client, before its end

    @property
    def path(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"


@st.composite
def calls(draw: st.DrawFn) -> Call:
    method = draw(st.sampled_from(METHODS))
    if draw(chance(20)):
        body = draw(st.binary(max_size=64))
    else:
        body = draw(messages(method.input_type)).SerializeToString()
        if draw(chance(8)):
            body = draw(damaged(body))
    timeout = draw(st.sampled_from([0.001, 0.02])) if draw(chance(12)) else PATIENCE
    return Call(method, body, timeout, is_left=draw(chance(12)))


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor) -> Message:
    message = GetMessageClass(kind)()
    if isinstance(message, pb.GenerateRequest) and not draw(chance(8)):  # else hardly any would have a sound prompt
        message.token_ids.ids.extend(draw(st.lists(TOKEN_IDS, min_size=1, max_size=40)))
        message.params.max_tokens = draw(PLAUSIBLE["max_tokens"])
    if not kind.fields:
        return message
    for field in draw(st.lists(st.sampled_from(tuple(kind.fields)), unique=True, max_size=4)):
        fill(draw, message, field)
    return message


def fill(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    """Give the field a value."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        getattr(message, field.name).update(draw(st.dictionaries(values(key), values(value), max_size=5)))
    elif kind is not None and field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(messages(kind), max_size=3)))
    elif kind is not None:
        part = getattr(message, field.name)
        part.SetInParent()
        part.MergeFrom(draw(messages(kind)))
    elif field.is_repeated:
        longest = 600 if draw(chance(10)) else 6
        getattr(message, field.name).extend(draw(st.lists(values(field), max_size=longest)))
    else:
        setattr(message, field.name, draw(values(field)))


@st.composite
def values(draw: st.DrawFn, field: FieldDescriptor) -> object:
    return draw(hostile(field) if draw(chance(8)) else plausible(field))


def plausible(field: FieldDescriptor) -> st.SearchStrategy:
    if field.name in PLAUSIBLE:
        return PLAUSIBLE[field.name]
    if field.cpp_type in LARGEST:
        return st.integers(0, 8)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 1.5])
    return st.text(max_size=8) if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else hostile(field)


def hostile(field: FieldDescriptor) -> st.SearchStrategy:
    """Anything that the wire can carry."""
    if field.cpp_type in LARGEST:
        largest = LARGEST[field.cpp_type]
        smallest = 0 if field.cpp_type in UNSIGNED else -largest - 1
        edges = {smallest, largest, max(-1, smallest), VOCAB, 2_000_000_000}
        return st.sampled_from(sorted(edges)) | st.integers(smallest, largest)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.floats()
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=64)
    assert field.cpp_type == FieldDescriptor.CPPTYPE_STRING, f"no values are known for {field.full_name}"
    return st.sampled_from(["", "\0", "[" * 2000, "{}", "🫠" * 400]) | st.text(max_size=300)


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """Some bytes changed, put in or left out."""
    whole = bytearray(body)
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(whole)))
        whole[begin : begin + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(whole)


def chance(one_in: int) -> st.SearchStrategy[bool]:
    """True once in so many; simple examples hold False."""
    return st.integers(0, one_in - 1).map(lambda drawn: drawn == one_in - 1)
