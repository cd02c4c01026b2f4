"""OpenAI bodies: every field has its effect or is refused by name, and no type of value does worse than that."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.constraints import StructuredOutputs
from jaxserve.request import Chunk, ErrorCode, FinishReason, RequestError, SamplingParams, TokenLogprobs, Usage
from server.args import ServerConfig
from server.limits import Limits
from server.openai_fields import FIELDS, SAMPLING
from server.openai_response import body_of
from server.openai_schema import Asked, asked_of
from tests.server.stub import StubEngine, StubTokenizer
from tests.server.test_translate import CHANGED

TOKENIZER = StubTokenizer()
LIMITS = Limits.of(ServerConfig(), StubEngine(queue_limit=1024))
CHAT = [{"role": "user", "content": "hi"}]


def ask(kind="completion", **fields) -> Asked:
    body = {"prompt": "hi"} if kind == "completion" else {"messages": CHAT}
    body = json.loads(json.dumps({**body, **fields}))
    return asked_of(body, kind, request_id="r", models=["stub", "ref"], tokenizer=TOKENIZER, limits=LIMITS, now=0.0)


def refusal(kind="completion", **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ask(kind, **fields)
    assert len(caught.value.message) < 400
    return caught.value


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("kind", FIELDS)
def test_every_sampling_field_has_its_effect(kind, name: str) -> None:
    value = CHANGED[name] if name != "logit_bias" else {"7": -1.5}
    if name == "seed":
        value = -5
    params = ask(kind, **{name: value}).params
    wanted = {"seed": -5, "structured_outputs": StructuredOutputs(regex="a+")}.get(name, CHANGED[name])
    assert getattr(params, name) == wanted
    assert dataclasses.replace(ask(kind).params, **{name: getattr(params, name)}) == params


def test_every_field_of_sampling_params_can_be_said_in_a_body() -> None:
    said = {*SAMPLING, "max_tokens", "logprobs", "prompt_logprobs"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} - said == {"detokenize"}  # a body wants text


BOUNDED = [
    (kind, name)
    for kind, fields in FIELDS.items()
    for name, field in fields.items()
    if {"minimum", "maximum", "exclusiveMinimum"} & set(field.schema)
]


@pytest.mark.parametrize(("kind", "name"), BOUNDED)
def test_the_bounds_that_the_schema_tells_are_those_that_are_checked(kind, name: str) -> None:
    schema = FIELDS[kind][name].schema
    step = 1 if schema["type"] == "integer" else 1e-6
    mates = {
        "top_logprobs": {"logprobs": True},
        "min_tokens": {"max_tokens": 2**31 - 1},
        "max_tokens": {"min_tokens": 0},
    }
    for bound, sign in (("minimum", -1), ("maximum", 1)):
        if bound in schema:
            ask(kind, **mates.get(name, {}), **{name: schema[bound]})
            assert refusal(kind, **mates.get(name, {}), **{name: schema[bound] + sign * step}).field == name
    if "exclusiveMinimum" in schema:
        assert refusal(kind, **{name: schema["exclusiveMinimum"]}).field == name


def test_defaults_are_openais() -> None:
    assert ask().params == SamplingParams(max_tokens=16)
    assert ask("chat").params == SamplingParams()


def test_null_is_the_same_as_nothing() -> None:
    fields = dict.fromkeys(set(FIELDS["completion"]) - {"prompt"})
    assert ask(**fields) == ask()


def test_logprobs_of_both_forms() -> None:
    assert ask(logprobs=0).params.logprobs == 0
    assert ask("chat", logprobs=True).params.logprobs == 0
    assert ask("chat", logprobs=True, top_logprobs=5).params.logprobs == 5
    assert ask("chat", logprobs=False).params.logprobs is None
    assert refusal("chat", top_logprobs=5).field == "top_logprobs"
    assert refusal(logprobs=True).field == "logprobs"
    assert refusal("chat", logprobs=3).field == "logprobs"


def test_echo_asks_for_the_prompts_logprobs_when_logprobs_are_wanted() -> None:
    asked = ask(echo=True, logprobs=2, max_tokens=0)
    assert asked.echoes == ("hi",) and asked.params.prompt_logprobs == 2 and asked.params.max_tokens == 0
    assert ask(echo=True).params.prompt_logprobs is None
    assert ask(prompt=[104, 105], echo=True).echoes == ("hi",)
    assert ask().echoes is None


def test_max_completion_tokens_is_max_tokens() -> None:
    assert ask("chat", max_completion_tokens=5).params.max_tokens == 5
    assert ask("chat", max_completion_tokens=5, max_tokens=5).params.max_tokens == 5
    assert refusal("chat", max_completion_tokens=5, max_tokens=6).field == "max_completion_tokens"
    assert refusal(max_completion_tokens=5).field == "max_completion_tokens"


def test_prompts_are_text_or_ids() -> None:
    assert ask(prompt="é").requests[0].prompt_ids == tuple("é".encode())
    assert ask(prompt=[1, 2]).requests[0].prompt_ids == (1, 2)
    assert ask("chat").requests[0].prompt_ids[0] == 256
    assert ask("chat", add_generation_prompt=False).requests[0].prompt_ids[-1] == ord("\n")


def test_priority_salt_and_model_reach_the_request() -> None:
    request = ask(priority=3, cache_salt="me", model="ref").requests[0]
    assert (request.id, request.priority, request.cache_salt) == ("r", 3, "me")
    assert refusal(model="gpt-4").code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("completion", {"prompt": ""}, "prompt"),
        ("completion", {"prompt": []}, "prompt"),
        ("completion", {"prompt": None}, "prompt"),
        ("completion", {"prompt": ["a", ""]}, "prompt[1]"),
        ("completion", {"prompt": [[1], []]}, "prompt[1]"),
        ("completion", {"prompt": ["a", 5]}, "prompt[1]"),
        ("completion", {"prompt": [[1], [300]]}, "prompt[1]"),
        ("completion", {"prompt": [1, "a"]}, "prompt"),
        ("completion", {"prompt": ["a", "b" * 600]}, "prompt[1]"),
        ("completion", {"prompt": ["a"] * 2000}, "prompt"),
        ("completion", {"prompt": ["a"] * 20, "n": 100}, "prompt"),
        ("completion", {"prompt": [1, 300]}, "prompt"),
        ("completion", {"prompt": [2_000_000_000]}, "prompt"),
        ("completion", {"prompt": [1.5]}, "prompt"),
        ("completion", {"prompt": list(range(256)) * 3}, "prompt"),
        ("completion", {"prompt": "\ud800"}, "prompt"),
        ("completion", {"stop": [""]}, "stop"),
        ("completion", {"stop": 5}, "stop"),
        ("completion", {"stop": [5]}, "stop"),
        ("completion", {"temperature": "hot"}, "temperature"),
        ("completion", {"temperature": True}, "temperature"),
        ("completion", {"temperature": float("nan")}, "temperature"),
        ("completion", {"temperature": 10**400}, "temperature"),
        ("completion", {"max_tokens": 5.0}, "max_tokens"),
        ("completion", {"max_tokens": 10**400}, "max_tokens"),
        ("completion", {"n": 0}, "n"),
        ("completion", {"n": True}, "n"),
        ("completion", {"logit_bias": [1]}, "logit_bias"),
        ("completion", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("completion", {"logit_bias": {"-1": 1}}, "logit_bias"),
        ("completion", {"logit_bias": {"1": "much"}}, "logit_bias"),
        ("completion", {"stop_token_ids": 5}, "stop_token_ids"),
        ("completion", {"ignore_eos": "yes"}, "ignore_eos"),
        ("completion", {"stream": "yes"}, "stream"),
        ("completion", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completion", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ("completion", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ("completion", {"timeout": 0}, "timeout"),
        ("completion", {"timeout": 10**9}, "timeout"),
        ("completion", {"user": "u" * 300}, "user"),
        ("completion", {"suffix": "x"}, "suffix"),
        ("completion", {"best_of": 2}, "best_of"),
        ("completion", {"messages": CHAT}, "messages"),
        ("completion", {"cache_salt": "s" * 300}, "cache_salt"),
        ("chat", {"prompt": "x"}, "prompt"),
        ("chat", {"store": True}, "store"),
        ("chat", {"service_tier": "priority"}, "service_tier"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities"),
        ("chat", {"metadata": {"a": "b"}}, "metadata"),
        ("chat", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages[0].content[0].b",
        ),
        ("chat", {"tools": []}, "tools"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": None}, "messages"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": ["hi"]}, "messages"),
        ("chat", {"messages": [{"role": "user"}]}, "messages"),
        ("chat", {"messages": [{"role": "pirate", "content": "x"}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(kind, fields: dict, field: str) -> None:
    assert refusal(kind, **fields).field == field


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_a_body_is_an_object(body) -> None:
    with pytest.raises(RequestError, match="object"):
        asked_of(body, "chat", request_id="r", models=["stub"], tokenizer=TOKENIZER, limits=LIMITS, now=0.0)


def test_a_huge_value_is_not_echoed_back() -> None:
    for value in ("x" * 10**6, ["x" * 10**6], {"y" * 10**6: 1}, 10**4000):
        for name in ("temperature", "n", "stop_token_ids", "echo", "logit_bias"):
            refusal(**{name: value})
    refusal(**{"z" * 10**6: 1})


TEXT = st.text(max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=100)
@given(st.sampled_from(list(FIELDS)), st.data())
def test_any_json_is_a_request_or_a_refusal(kind, data: st.DataObject) -> None:
    names = st.sampled_from(list(FIELDS[kind])) | st.text(max_size=5)
    body = data.draw(st.dictionaries(names, JSON, max_size=3))
    body.setdefault(*(("prompt", "x") if kind == "completion" else ("messages", CHAT)))
    message = ""
    try:
        asked_of(body, kind, request_id="r", models=["stub"], tokenizer=TOKENIZER, limits=LIMITS, now=0.0)
    except RequestError as error:
        message = error.message
    assert len(message) < 1000


# -- answers -----------------------------------------------------------------------------------------------------------


def entry(token_id: int, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)


def sample(**fields) -> Chunk:
    usage = Usage(prompt_tokens=2, completion_tokens=2, cached_tokens=1)
    base = Chunk(request_id="r", token_ids=(240, 159), text="�", finish_reason=FinishReason.LENGTH, usage=usage, seed=4)
    return dataclasses.replace(base, **fields)


def body(asked: Asked, *samples: Chunk) -> dict:
    made = body_of(asked, samples, model="stub", created=5, tokenizer=TOKENIZER)
    return json.loads(json.dumps(made, allow_nan=False))


def test_a_completion_has_openais_shape() -> None:
    answer = body(ask(n=2), sample(), sample(index=1, finish_reason=FinishReason.STOP, stop_reason="END"))
    assert (answer["object"], answer["model"], answer["created"]) == ("text_completion", "stub", 5)
    first, second = answer["choices"]
    assert first["seed"] == second["seed"] == 4
    assert (first["index"], first["text"], first["finish_reason"], first["logprobs"]) == (0, "�", "length", None)
    assert (second["index"], second["finish_reason"], second["stop_reason"]) == (1, "stop", "END")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 4, 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert "completion_tokens_details" not in usage, "no drafts, nothing to tell of them"


def test_drafted_tokens_are_accepted_or_rejected() -> None:
    drafted = Usage(prompt_tokens=2, completion_tokens=2, drafts=2, drafted_tokens=7, accepted_tokens=2)
    details = body(ask(n=2), sample(usage=drafted), sample(index=1))["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 5}


def test_a_chat_has_openais_shape_with_bytes() -> None:
    (choice,) = body(ask("chat", logprobs=True), sample(logprobs=(entry(240, (240, -0.5), (104, -1.0)), entry(159))))[
        "choices"
    ]
    assert choice["message"] == {"role": "assistant", "content": "�"}
    first = choice["logprobs"]["content"][0]
    assert first["bytes"] == [240] and [top["token"] for top in first["top_logprobs"]] == ["�", "h"]


def test_echo_puts_the_prompt_and_its_logprobs_in_front() -> None:
    asked = ask(echo=True, logprobs=1)
    both = (entry(240, (240, -0.5)), entry(159, (7, -0.1)))
    (choice,) = body(asked, sample(logprobs=both, prompt_logprobs=(None, entry(105, (105, -0.5)))))["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "hi�"
    assert logprobs["tokens"] == ["h", "i", "bytes:\\xf0", "bytes:\\x9f"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][3] == {"\x07": -0.1, "bytes:\\x9f": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2, 2]


def test_echo_of_no_tokens_at_all() -> None:
    asked = ask(echo=True, logprobs=1, max_tokens=0)
    (choice,) = body(asked, sample(token_ids=(), text="", prompt_logprobs=(None, entry(105))))["choices"]
    assert choice["text"] == "hi" and choice["logprobs"]["token_logprobs"] == [None, -0.5]


def test_two_ids_of_one_text_are_two_entries() -> None:
    twins = entry(298, (298, -0.5), (299, -0.7))  # ids without a token: both are the empty text
    (choice,) = body(ask(logprobs=2), sample(token_ids=(298,), logprobs=(twins,)))["choices"]
    assert len(choice["logprobs"]["top_logprobs"][0]) == 2


def test_prompt_logprobs_and_token_ids_are_returned_when_asked_for() -> None:
    asked = ask(prompt_logprobs=1, return_token_ids=True)
    (choice,) = body(asked, sample(prompt_logprobs=(None, entry(105, (9, -0.1)))))["choices"]
    assert choice["prompt_logprobs"][0] is None and set(choice["prompt_logprobs"][1]) == {"105", "9"}
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([104, 105], [240, 159])
