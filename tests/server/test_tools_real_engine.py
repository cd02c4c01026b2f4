"""Tools around the real engine: random weights at temperature 1 call as the grammar says, and only so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema_rs
import openai
import pytest
from tokenizers import Tokenizer

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.start import load_engine
from server.args import ServerConfig
from tests.server.http_client import Reply, post
from tests.server.serving import Served, serving
from tests.tiny_model import TEMPLATE, write_tiny_model

MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>"]
TOOL_TEMPLATE = (  # in few tokens
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}"
    '<tool_call>{"name": f, "arguments": {}}</tool_call>{% endif %}'
) + TEMPLATE
OPEN = 422  # the first of them: the tiny model's own tokens end there
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Köln", 'a "b"\n']},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"anyOf": [{"const": "C"}, {"type": "null"}]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "tags": {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3}},
        "required": ["tags"],
        "additionalProperties": False,
        "$defs": {"tag": {"type": "string", "pattern": "^[a-z]{1,4}$"}},
    },
    "now": {"type": "object", "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
ASK = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS, "max_tokens": 300}
ONE = {"parallel_tool_calls": False}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_tiny_model(tmp_path_factory.mktemp("tools") / "tiny")
    teach_tools(folder)
    small = {"slots": 8, "page_size": 16, "prefill_chunk": 64, "prefill_tokens": 64, "pool": "8192"}
    return load_engine(EngineConfig(model=str(folder), accelerator="cpu", batch_invariant=True, **small))


def teach_tools(folder: Path) -> None:
    """Gives the model the markers as control tokens, and a template with tools."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKERS)
    assert tokenizer.token_to_id(MARKERS[0]) == OPEN
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TOOL_TEMPLATE}))


@pytest.fixture(params=["hermes", "llama3"])
def served(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(engine, ServerConfig(http_port=0, tool_call_parser=request.param)) as served:
        yield served


def answers(served: Served, count: int, **body) -> list[dict]:
    """The choices of this many calls at once, each with its own seed."""

    def one(seed: int) -> Reply:
        return post(served.http, "/v1/chat/completions", **{**ASK, **body}, seed=seed)

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(one, range(count)))
    assert [reply.status for reply in replies] == [200] * count, replies[0].body
    return [reply.json["choices"][0] for reply in replies]


def check(calls: list[dict]) -> None:
    for call in calls:
        schema = SCHEMAS[call["function"]["name"]]
        jsonschema_rs.validator_for(schema).validate(json.loads(call["function"]["arguments"]))


def test_required_calls_are_always_valid(served: Served) -> None:
    choices = answers(served, 24, tool_choice="required", **ONE)
    for choice in choices:
        message = choice["message"]
        assert (
            choice["finish_reason"] == "tool_calls" and message["content"] is None and len(message["tool_calls"]) == 1
        )
        check(message["tool_calls"])
    assert {choice["message"]["tool_calls"][0]["function"]["name"] for choice in choices} > {"now"}


def test_a_named_tool_is_the_one_that_is_called(served: Served) -> None:
    for name in SCHEMAS:
        named = {"type": "function", "function": {"name": name}}
        for choice in answers(served, 4, tool_choice=named):
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == name and choice["finish_reason"] == "tool_calls"
            check([call])


@pytest.mark.parametrize("stop", [[], ["never drawn"]])  # with stop strings the engine's own thread decodes
def test_several_required_calls_are_all_valid(served: Served, stop: list[str]) -> None:
    for choice in answers(served, 8, tool_choice="required", stop=stop):
        calls = choice["message"]["tool_calls"]
        check(calls if choice["finish_reason"] == "tool_calls" else calls[:-1])


def test_a_call_that_a_model_begins_by_itself_is_valid_and_none_is_begun_where_none_may(engine: Engine) -> None:
    bias = {"logit_bias": {str(OPEN): 100}}  # begins a call wherever it may
    with serving(engine, ServerConfig(http_port=0)) as served:
        for choice in answers(served, 8, **bias, **ONE):
            check(choice["message"]["tool_calls"])
        for choice in answers(served, 4, **bias, max_tokens=40, tool_choice="none", return_token_ids=True):
            assert "tool_calls" not in choice["message"] and OPEN not in choice["token_ids"]


def test_text_is_free_when_tools_are_only_offered(engine: Engine) -> None:
    """The grammar of free text takes nothing away: the same seeds draw the same text as without tools' grammar."""
    prompt = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 24, "banned_token_ids": [OPEN, OPEN + 1]}
    with serving(engine, ServerConfig(http_port=0)) as served:
        told = post(served.http, "/tokenize", messages=prompt["messages"], tools=TOOLS).json["tokens"]
        same = compared = 0
        for seed in range(8):
            chat = post(served.http, "/v1/chat/completions", **prompt, tools=TOOLS, seed=seed, return_token_ids=True)
            more = {"max_tokens": 24, "banned_token_ids": [OPEN, OPEN + 1], "return_token_ids": True}
            plain = post(served.http, "/v1/completions", prompt=told, seed=seed, **more)
            ids = [reply.json["choices"][0]["token_ids"] for reply in (chat, plain)]
            length = next((i for i, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), len(ids[1]))
            same += length == len(ids[1])
            if length < len(ids[1]):  # a chat was refused bytes that are no text, or an id without a token: no more
                *before, refused = (engine.tokenizer.token_bytes(i) for i in ids[1][: length + 1])
                assert not refused or "\ufffd" in b"".join([*before, refused]).decode(errors="replace")
                compared += length
        assert same or compared > 8


def test_a_stream_says_what_the_whole_answer_says(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        body = {"model": client.models.list().data[0].id, **ASK, "tool_choice": "required", "seed": 7}
        whole = client.chat.completions.create(**body)
        with client.chat.completions.stream(**body) as stream:
            joined = stream.get_final_completion()
    said = [
        [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls or ()]
        for answer in (whole, joined)
    ]
    assert said[0] == said[1] and said[0]


def test_a_strict_tool_whose_schema_cannot_be_held_to_is_refused(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    with serving(engine, ServerConfig(http_port=0)) as served:
        reply = post(
            served.http, "/v1/chat/completions", **{**ASK, "tools": [{"type": "function", "function": function}]}
        )
        assert (reply.status, reply.error["param"]) == (400, "tools") and "uniqueItems" in reply.error["message"]
        more = {"tools": [{"type": "function", "function": function | {"strict": False}}], "max_tokens": 1}
        assert post(served.http, "/v1/chat/completions", **{**ASK, **more}).status == 200
