"""Tools while drafts are verified: 32 requests at once, each with tools of its own, offered, forbidden, required or named.
Drafts change no token of their answers, nor does a stream, and every call obeys its tool's schema.

Random weights at temperature 1; one engine, whose requests with `speculate: false` are verified against no draft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jsonschema_rs
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.start import load_engine
from server.args import ServerConfig, ToolCallParser
from tests.engine.schemas import listed, record, whole
from tests.server.http_client import post
from tests.server.serving import Served, serving
from tests.server.test_tools_real_engine import MARKERS, OPEN, teach_tools
from tests.tiny_model import write_tiny_model

COUNT = 32
SMALL = {
    "slots": COUNT, "page_size": 16, "prefill_chunk": 64, "prefill_tokens": 64, "pool": "16384", "accelerator": "cpu",
}  # fmt: skip
OPENINGS: dict[ToolCallParser, int] = {  # the token that begins a call
    "hermes": OPEN,
    "llama3": OPEN + MARKERS.index("<|python_tag|>"),
}
CHOICES = ("required", "named", "auto", "none")


def tool(number: int, kind: int) -> dict:
    """Closed and short, so that random weights come to an end; no two numbers have the same bounds or words."""
    kinds = [
        record({"days": whole(number, number + 40), "dry": {"type": "boolean"}}),
        record({"city": {"enum": [f"Rome {number}", f"Köln {number}", f'a "{number}"\n']}}, required=[]),
        record({"at": {"$ref": "#/$defs/hour"}, "to": {"$ref": "#/$defs/hour"}})
        | {"$defs": {"hour": whole(number, 99)}},
        record({"steps": listed(record({"on": {"type": "boolean"}, "n": whole(0, number)}), 1, 2)}),
        record({}),
        record({"unit": {"anyOf": [{"const": f"C{number}"}, {"type": "null"}, whole(-number, 0)]}}),
    ]
    return {"type": "function", "function": {"name": f"call{number}_{kind}", "parameters": kinds[kind]}}


def tools_of(number: int) -> list[dict]:
    """One to three tools that no other number has."""
    return [tool(number, (number + more) % 6) for more in range(1 + number % 3)]


def choice_of(number: int) -> str:
    """Over all numbers each kind of tool meets each choice."""
    return CHOICES[number // 6 % 4]


@dataclass(frozen=True)
class Answer:
    content: str
    calls: Sequence[tuple[str, str]]  # name, arguments
    finish_reason: str
    token_ids: Sequence[int]


def whole_answer(choice: dict) -> Answer:
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return Answer(message["content"] or "", calls, choice["finish_reason"], choice["token_ids"])


def joined_answer(choices: Sequence[dict]) -> Answer:
    """choices: of a stream's chunks, in order.  A call's name and id come whole, with its first piece."""
    calls: list[list[str]] = []
    for piece in (piece for choice in choices for piece in choice["delta"].get("tool_calls", ())):
        function = piece["function"]
        if piece["index"] == len(calls):
            assert piece["id"] and piece["type"] == "function"
            calls.append([function["name"], function.get("arguments", "")])
        else:
            assert piece["index"] == len(calls) - 1 and "name" not in function
            calls[-1][1] += function["arguments"]
    (finish_reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    return Answer(content, [(name, arguments) for name, arguments in calls], finish_reason, token_ids)


def ask(served: Served, form: ToolCallParser, number: int, *, speculate: bool, stream: bool) -> Answer:
    choice = choice_of(number)
    tools = tools_of(number)
    named = {"type": "function", "function": {"name": tools[-1]["function"]["name"]}}
    body = {
        "messages": [{"role": "user", "content": "Call, call and call again."}],
        "tools": tools, "tool_choice": named if choice == "named" else choice, "parallel_tool_calls": False,
        "seed": number, "max_tokens": 160, "speculate": speculate, "stream": stream,
        "return_token_ids": True,
    }  # fmt: skip
    if choice in ("auto", "none"):
        body |= {"logit_bias": {str(OPENINGS[form]): 100}, "max_tokens": 80}  # begins a call wherever it may
    reply = post(served.http, "/v1/chat/completions", **body)
    assert reply.status == 200, reply.body
    if stream:
        return joined_answer([choice for event in reply.events for choice in event["choices"]])
    return whole_answer(reply.json["choices"][0])


def check(answer: Answer, form: ToolCallParser, number: int) -> None:
    """The answer is one that this number's choice and tools allow."""
    choice = choice_of(number)
    if choice == "none":
        assert not answer.calls and answer.finish_reason in ("stop", "length")
        assert OPENINGS[form] not in answer.token_ids
        return
    ((name, arguments),) = answer.calls
    functions = {each["function"]["name"]: each["function"]["parameters"] for each in tools_of(number)}
    assert name in functions
    if choice == "named":
        assert name == list(functions)[-1]
    if choice != "auto":  # behind a call that was only offered there may be text, as long as it likes
        assert (answer.content, answer.finish_reason) == ("", "tool_calls")
    jsonschema_rs.validator_for(functions[name]).validate(json.loads(arguments))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_tiny_model(tmp_path_factory.mktemp("tools") / "tiny")
    teach_tools(folder)
    return load_engine(EngineConfig(model=str(folder), draft="ngram", speculate_tokens=4, **SMALL))


@pytest.mark.parametrize("form", OPENINGS)
def test_drafts_and_streams_change_nothing_of_a_call_and_every_call_obeys_its_schema(
    engine: Engine, form: ToolCallParser
) -> None:
    with serving(engine, ServerConfig(http_port=0, tool_call_parser=form)) as served:
        show(engine, served, form)


def show(engine: Engine, served: Served, form: ToolCallParser) -> None:
    def ask_all(*, speculate: bool, stream: bool) -> list[Answer]:
        def one(number: int) -> Answer:
            return ask(served, form, number, speculate=speculate, stream=stream)

        with ThreadPoolExecutor(COUNT) as pool:
            return list(pool.map(one, range(COUNT)))

    before = engine.load()
    wanted = ask_all(speculate=False, stream=False)
    for number, answer in enumerate(wanted):
        check(answer, form, number)
    assert engine.load().draft_tokens == before.draft_tokens, "a request that asked for no drafts was given some"
    assert ask_all(speculate=True, stream=False) == wanted
    assert ask_all(speculate=True, stream=True) == wanted
    load = engine.load()
    assert load.accepted_tokens > before.accepted_tokens, "no draft was accepted: this proves little"
    assert load.compiles == before.compiles
