"""Tools over HTTP: the official client finds calls, answers them and streams them; every frame is pinned.

The engine is the stub that says a given text.  Transcripts are in tests/data/server/tools/; write them anew with
`python -m tests.server.test_http_tools`, and read the diff."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import jsonschema_rs
import openai
import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall

from server.args import ServerConfig
from server.openapi import document
from tests.server.http_client import Reply, post
from tests.server.serving import Served, serving
from tests.server.stub import StubEngine, StubTokenizer
from tests.server.test_http_golden import normalised
from tests.text.tool_templates import LLAMA31, QWEN

FOLDER = Path(__file__).parents[1] / "data" / "server" / "tools"
OPEN, CLOSE, TAG = 259, 260, 261  # control tokens of the stubs below


class HermesTokenizer(StubTokenizer):
    """<tool_call> is plain text, as in Qwen's vocabularies."""

    chat_template = QWEN


class HermesTokens(StubTokenizer):
    """<tool_call> is a control token, which text does not show."""

    chat_template = QWEN
    special_tokens: Mapping[str, int] = {**StubTokenizer.special_tokens, "<tool_call>": OPEN, "</tool_call>": CLOSE}
    special_ids = frozenset(special_tokens.values())


class LlamaTokens(StubTokenizer):
    chat_template = LLAMA31
    special_tokens: Mapping[str, int] = {**StubTokenizer.special_tokens, "<|python_tag|>": TAG}
    special_ids = frozenset(special_tokens.values())


class UnknownTokenizer(StubTokenizer):
    """Its template takes tools, in a form of its own."""

    chat_template = "{{ tools }}{{ messages[0].content }}"


WEATHER = '{"name": "weather", "arguments": {"city": "Köln", "days": 2}}'
NOW = '{"name": "now", "arguments": {}}'
TWO_CALLS = f"Let me look.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>"
TWO_CALLS_IDS = [
    *b"Let me look.\n", OPEN, *f"\n{WEATHER}\n".encode(), CLOSE, *b"\n", OPEN, *f"\n{NOW}\n".encode(), CLOSE
]  # fmt: skip
TEXT = "Use <tool_call> for that, if 1 < 2.\n"
ENGINES: dict[str, tuple[str | Sequence[int], StubTokenizer]] = {
    "hermes": (TWO_CALLS, HermesTokenizer()),
    "hermes_tokens": (TWO_CALLS_IDS, HermesTokens()),
    "llama3": (WEATHER.replace("arguments", "parameters"), LlamaTokens()),
    "llama3_tag": ([TAG, *NOW.replace("arguments", "parameters").encode()], LlamaTokens()),
    "text": (TEXT, HermesTokenizer()),
    "unknown": (TEXT, UnknownTokenizer()),
    "no_tools": (TEXT, StubTokenizer()),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tomorrow's weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CHAT = [{"role": "user", "content": "Rain?"}]
JSON = {"type": "json_object"}
ASK = {"messages": CHAT, "tools": TOOLS, "seed": 5}

# name -> engine, body
CALLS: dict[str, tuple[str, dict]] = {
    "hermes": ("hermes", ASK),
    "hermes_stream": ("hermes", {**ASK, "stream": True, "stream_options": {"include_usage": True}}),
    "hermes_tokens_stream": ("hermes_tokens", {**ASK, "stream": True}),
    "hermes_length": ("hermes", {**ASK, "max_tokens": 62}),
    "llama3": ("llama3", ASK),
    "llama3_stream": ("llama3", {**ASK, "stream": True}),
    "llama3_tag_stream": ("llama3_tag", {**ASK, "stream": True}),
    "text": ("text", ASK),
    "text_stream": ("text", {**ASK, "stream": True}),
    "none": ("hermes", {**ASK, "tool_choice": "none"}),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, tuple[Served, StubEngine]]]:
    with ExitStack() as stack:
        yield started(stack)


def started(stack: ExitStack) -> dict[str, tuple[Served, StubEngine]]:
    made = {}
    for name, (answer, tokenizer) in ENGINES.items():
        engine = StubEngine(answer=answer, tokenizer=tokenizer, max_len=8192, is_paced=True)
        made[name] = (stack.enter_context(serving(engine, ServerConfig(http_port=0))), engine)
    return made


@pytest.mark.parametrize("name", [name for name, (_, body) in CALLS.items() if "stream" not in body])
def test_an_answer_is_as_the_openapi_document_tells(servers: dict[str, tuple[Served, StubEngine]], name: str) -> None:
    engine, body = CALLS[name]
    paths = document()["paths"]
    answer = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema_rs.validate(answer, post(servers[engine][0].http, "/v1/chat/completions", **body).json)
    request = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema_rs.validate(request, body)


def functions_of(message: ChatCompletionMessage) -> list[ChatCompletionMessageFunctionToolCall]:
    calls = message.tool_calls or []
    assert all(isinstance(call, ChatCompletionMessageFunctionToolCall) for call in calls)
    return [call for call in calls if call.type == "function"]


def chat(served: Served, **body) -> Reply:
    return post(served.http, "/v1/chat/completions", **body)


def transcript(served: Served, body: dict) -> str:
    return re.sub(r"call_[0-9a-f]{24}", "call_ID", normalised(chat(served, **body)))


@pytest.mark.parametrize("name", CALLS)
def test_every_byte_is_as_it_was(servers, name: str) -> None:
    engine, body = CALLS[name]
    assert transcript(servers[engine][0], body) == (FOLDER / f"{name}.txt").read_text()


def test_no_transcript_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CALLS)


@pytest.mark.parametrize("name", ["hermes", "hermes_tokens"])
def test_a_conversation_with_the_official_client(servers, name: str) -> None:
    served, engine = servers[name]
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="stub", messages=CHAT, tools=TOOLS)  # pyright: ignore
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        calls = functions_of(choice.message)
        assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("function", "weather", {"city": "Köln", "days": 2}), ("function", "now", {})
        ]  # fmt: skip
        assert len({call.id for call in calls}) == 2
        results = [{"role": "tool", "tool_call_id": call.id, "content": "no rain"} for call in calls]
        again = [*CHAT, choice.message.model_dump(), *results]  # nulls and all
        client.chat.completions.create(model="stub", messages=again, tools=TOOLS)  # pyright: ignore
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids, skip_special=False)
    assert f"<|im_start|>assistant\n{TWO_CALLS}<|im_end|>" in prompt  # as the model said it, so its pages are found
    assert prompt.count("\n<tool_response>\nno rain\n</tool_response>") == 2


@pytest.mark.parametrize("name", ["hermes", "hermes_tokens", "llama3", "llama3_tag", "text"])
def test_the_official_client_puts_a_stream_together_as_the_whole_answer(servers, name: str) -> None:
    served, _ = servers[name]
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="stub", messages=CHAT, tools=TOOLS, n=2)  # pyright: ignore
        with client.chat.completions.stream(model="stub", messages=CHAT, tools=TOOLS, n=2) as stream:  # pyright: ignore
            joined = stream.get_final_completion()
    for one, other in zip(whole.choices, joined.choices, strict=True):
        assert one.finish_reason == other.finish_reason == ("stop" if name == "text" else "tool_calls")
        assert one.message.content == (other.message.content or None)
        said = [
            [(call.function.name, call.function.arguments) for call in functions_of(message)]
            for message in (one.message, other.message)
        ]
        assert said[0] == said[1] and bool(said[0]) == (name != "text")


def test_deltas_have_openais_shape(servers) -> None:
    choices = [event["choices"][0] for event in chat(servers["hermes"][0], **ASK, stream=True).events]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert all(delta for delta in deltas[:-1]) and deltas[-1] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in begun] == [
        (0, "function", "weather"), (1, "function", "now")
    ]  # fmt: skip
    assert all(set(call) == {"index", "function"} for call in calls if call not in begun)
    assert all(set(call["function"]) == {"arguments"} for call in calls if call not in begun)
    assert len(calls) > 20  # arguments come as they are drawn


def test_an_answer_of_calls_alone_has_no_content(servers) -> None:
    message = chat(servers["llama3"][0], **ASK).json["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1
    first = chat(servers["llama3"][0], **ASK, stream=True).events[0]["choices"][0]["delta"]
    assert first["content"] is None and first["tool_calls"][0]["function"]["name"] == "weather"


def test_logprobs_and_ids_of_tokens_that_are_held_back_are_told_once(servers) -> None:
    body = {**ASK, "logprobs": True, "return_token_ids": True}
    whole = chat(servers["hermes"][0], **body).json["choices"][0]
    parts = [event["choices"][0] for event in chat(servers["hermes"][0], **body, stream=True).events]
    assert list(itertools.chain.from_iterable(part["token_ids"] for part in parts)) == whole["token_ids"]
    entries = itertools.chain.from_iterable(part["logprobs"]["content"] for part in parts)
    assert list(entries) == whole["logprobs"]["content"] and len(whole["logprobs"]["content"]) == len(
        whole["token_ids"]
    )


def test_calls_that_are_cut_off_do_not_end_as_calls(servers) -> None:
    choice = chat(servers["hermes"][0], **ASK, max_tokens=62).json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"ci'
    choice = chat(servers["hermes"][0], **ASK, stop=["Köln"]).json["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Köln")


def test_text_without_calls_is_the_message_as_it_stands(servers) -> None:
    for more in ({}, {"tool_choice": "auto", "parallel_tool_calls": False}, {"tool_choice": "none"}):
        choice = chat(servers["text"][0], **ASK, **more).json["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": TEXT} and choice["finish_reason"] == "stop"
    choice = chat(servers["hermes"][0], **ASK, tool_choice="none").json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": TWO_CALLS}


def test_the_answers_grammar_follows_the_choice_and_another_one_only_where_no_call_may_stand(servers) -> None:
    served, engine = servers["hermes"]
    named = {"type": "function", "function": {"name": "now"}}
    grammars = []
    for choice in ("auto", "none", "required", named):
        chat(served, **ASK, tool_choice=choice, max_tokens=1)
        grammars.append(engine.requests[-1].params.structured_outputs)
    assert len({grammar and grammar.grammar for grammar in grammars} - {None}) == 4
    chat(served, **ASK, tool_choice="none", response_format=JSON, max_tokens=1)
    asked = engine.requests[-1].params.structured_outputs
    assert asked is not None and asked.json_object


def test_tokenize_counts_the_tools(servers) -> None:
    served, engine = servers["hermes"]
    chat(served, **ASK, max_tokens=1)
    ids = list(engine.requests[-1].prompt_ids)
    assert post(served.http, "/tokenize", messages=CHAT, tools=TOOLS).json["tokens"] == ids
    assert post(served.http, "/tokenize", messages=CHAT).json["count"] < len(ids)
    assert post(served.http, "/tokenize", prompt="x", tools=TOOLS).error["param"] == "tools"


@pytest.mark.parametrize(
    ("engine", "more", "field", "reason"),
    [
        ("no_tools", {"tools": TOOLS}, "tools", "this model's chat template takes no tools"),
        ("unknown", {"tools": TOOLS}, "tools", "start the server with --tool-call-parser hermes or llama3"),
        ("hermes", {"tools": []}, "tools", "at least one function"),
        ("hermes", {"tools": [{"type": "web_search"}]}, "tools", "tools[0].type must be 'function'"),
        ("hermes", {"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "must be"),
        (
            "hermes",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "later"}}},
            "tool_choice",
            "'later', which is not among tools",
        ),
        ("hermes", {"tool_choice": "auto"}, "tool_choice", "tool_choice goes with tools"),
        ("hermes", {"parallel_tool_calls": True}, "parallel_tool_calls", "parallel_tool_calls goes with tools"),
        ("hermes", {"tools": TOOLS, "response_format": JSON}, "response_format", "only if tool_choice is none"),
        ("hermes", {"tools": TOOLS, "response_format": JSON, "tool_choice": "required"}, "response_format", "only if"),
        ("hermes", {"functions": []}, "functions", "functions is not a field that this server supports"),
        (
            "no_tools",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages",
            "no place for tool calls",
        ),
        (
            "hermes",
            {"messages": [{"role": "assistant", "tool_calls": [{"index": 0, "function": {}}]}]},
            "messages[0].tool_calls[0].index",
            "is not a field",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(servers, engine: str, more: dict, field: str, reason: str) -> None:
    reply = chat(servers[engine][0], **{"messages": CHAT, **more})
    assert (reply.status, reply.error["param"]) == (400, field) and reason in reply.error["message"]


def test_the_parser_of_a_template_that_does_not_tell_is_chosen_by_the_flag() -> None:
    engine = StubEngine(answer=TWO_CALLS, tokenizer=UnknownTokenizer(), max_len=8192)
    with serving(engine, ServerConfig(http_port=0, tool_call_parser="hermes")) as served:
        message = chat(served, **ASK).json["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        servers = started(stack)
        for name, (engine, body) in CALLS.items():
            (FOLDER / f"{name}.txt").write_text(transcript(servers[engine][0], body))


if __name__ == "__main__":
    sys.exit(main())
