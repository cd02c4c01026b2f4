"""The official OpenAI client against the served app: what its users rely on, sync, async, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionStreamOptionsParam

from server.args import ServerConfig
from tests.server.http_client import post, send
from tests.server.serving import Served, serving, until
from tests.server.stub import ANSWER, BOS, IM_END, StubEngine

CONFIG = ServerConfig(http_port=0)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> StubEngine:
    return StubEngine()


@pytest.fixture(scope="module")
def served(engine: StubEngine) -> Iterator[Served]:
    with serving(engine, CONFIG) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("stub", "model", "jaxserve")
    assert client.models.retrieve("stub") == model
    extra = model.model_extra
    assert extra is not None and extra["max_model_len"] == 512
    assert extra["limits"]["max_body_bytes"] == 64 * 2**20 and extra["limits"]["max_samples"] == 128


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="stub", prompt="hi", max_tokens=100, seed=7)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (ANSWER, "stop", 0, None)
    assert answer.usage is not None and answer.usage.total_tokens == 2 + len(ANSWER.encode()) + 1
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == "stub"


def test_a_chat(client: openai.OpenAI, engine: StubEngine) -> None:
    answer = client.chat.completions.create(model="stub", messages=CHAT, n=2)  # pyright: ignore
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
    assert answer.choices[0].message.role == "assistant" and answer.id.startswith("chatcmpl-")
    again = [*CHAT, answer.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "and"}]}]
    client.chat.completions.create(model="stub", messages=again)  # pyright: ignore
    assert bytes(i for i in engine.requests[-1].prompt_ids if i < 256).decode().split("\n")[5] == "and"


def test_streams_joined_are_the_whole_answer_without_an_empty_delta(client: openai.OpenAI) -> None:
    parts = list(client.completions.create(model="stub", prompt="hi", max_tokens=100, stream=True))
    assert "".join(part.choices[0].text for part in parts) == ANSWER
    assert all(part.choices[0].text for part in parts[:-1]) and parts[-1].choices[0].finish_reason == "stop"
    assert len({part.id for part in parts}) == len({part.created for part in parts}) == 1
    assert all(part.usage is None for part in parts)
    deltas = [
        part.choices[0].delta
        for part in client.chat.completions.create(model="stub", messages=CHAT, stream=True)  # pyright: ignore
    ]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == ANSWER and all(delta.content for delta in deltas[:-1])


def test_no_delta_holds_half_a_character_or_half_a_stop_string(client: openai.OpenAI) -> None:
    parts = client.completions.create(model="stub", prompt="x", max_tokens=100, stop="The end", stream=True)
    texts = [part.choices[0].text for part in parts]
    assert "".join(texts) == ANSWER.partition("The end")[0] and "🫠" in "".join(texts)
    assert all(texts[:-1]) and "�" not in "".join(texts)


def test_usage_comes_once_as_the_last_message_when_asked_for(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    for n, prompt in ((1, "hi"), (3, ["hi", "you"])):
        parts = list(
            client.completions.create(model="stub", prompt=prompt, n=n, stream=True, stream_options=options)  # pyright: ignore
        )
        assert all(part.usage is None and part.choices for part in parts[:-1])
        last = parts[-1]
        assert last.choices == [] and last.usage is not None
        prompts = 2 if n == 1 else 5
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (prompts, 16 * (1 if n == 1 else 6))
        whole = client.completions.create(model="stub", prompt=prompt, n=n)
        assert whole.usage == last.usage


def test_usage_tells_of_drafts_under_openais_names(client: openai.OpenAI) -> None:
    """The stub says of every sample: two tokens drafted, one accepted."""
    chat: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
    options: ChatCompletionStreamOptionsParam = {"include_usage": True}
    told = [
        client.completions.create(model="stub", prompt=["a", "b"], n=2).usage,
        client.chat.completions.create(model="stub", messages=chat, n=4).usage,
        *(part.usage for part in client.completions.create(
            model="stub", prompt=["a", "b"], n=2, stream=True, stream_options=options
        )),
        *(part.usage for part in client.chat.completions.create(
            model="stub", messages=chat, n=4, stream=True, stream_options=options
        )),
    ]  # fmt: skip
    details = [usage.completion_tokens_details for usage in told if usage is not None]
    assert len(details) == 4
    for each in details:
        assert each is not None
        assert (each.accepted_prediction_tokens, each.rejected_prediction_tokens) == (4, 4)


def test_lists_of_prompts_are_answered_prompt_after_prompt(client: openai.OpenAI, engine: StubEngine) -> None:
    for prompt in (["a", "bc"], [[97], [98, 99]]):
        whole = client.completions.create(model="stub", prompt=prompt, n=2, echo=True, max_tokens=3)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in whole.choices] == ["a Pa", "a Pa", "bc Pa", "bc Pa"]
        texts = ["", "", "", ""]
        for part in client.completions.create(model="stub", prompt=prompt, n=2, echo=True, max_tokens=3, stream=True):
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == [choice.text for choice in whole.choices]
        assert [request.prompt_ids for request in engine.requests[-2:]] == [(97,), (98, 99)]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_have_the_prompts_in_front_with_echo(client: openai.OpenAI, stream: bool) -> None:
    asked = {"model": "stub", "prompt": "hé", "echo": True, "logprobs": 2, "max_tokens": 3}
    if stream:
        choices = [part.choices[0] for part in client.completions.create(**asked, stream=True)]
    else:
        choices = client.completions.create(**asked).choices
    logprobs = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for each in logprobs for token in each.tokens or []]
    assert tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", " ", "P", "a"]
    assert [value for each in logprobs for value in each.token_logprobs or []] == [None] + [-0.5] * 5
    offsets = [offset for each in logprobs for offset in each.text_offset or []]
    assert offsets == [0, 1, 1, 2, 3, 4]
    tops = [top for each in logprobs for top in each.top_logprobs or []]
    assert tops[0] is None and set(tops[4]) == {"\x01", "\x02", "P"}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_tell_the_bytes_of_every_token(client: openai.OpenAI, stream: bool) -> None:
    asked = {"model": "stub", "messages": CHAT, "logprobs": True, "top_logprobs": 2}
    if stream:
        parts = list(client.chat.completions.create(**asked, stream=True))
        entries = [
            entry for part in parts if part.choices[0].logprobs for entry in part.choices[0].logprobs.content or []
        ]
    else:
        logprobs = client.chat.completions.create(**asked).choices[0].logprobs
        assert logprobs is not None
        entries = logprobs.content or []
    told = [byte for entry in entries for byte in entry.bytes or []]
    assert bytes(told) == ANSWER.encode() + b"<|im_end|>"
    assert all([top.bytes for top in entry.top_logprobs] == [[1], [2]] for entry in entries)


def test_echo_of_no_token_at_all(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="stub", prompt="hi", echo=True, logprobs=0, max_tokens=0).choices[0]
    parts = client.completions.create(model="stub", prompt="hi", echo=True, logprobs=0, max_tokens=0, stream=True)
    (streamed,) = [part.choices[0] for part in parts]
    for choice in (whole, streamed):
        assert (choice.text, choice.finish_reason) == ("hi", "length")
        assert choice.logprobs is not None and choice.logprobs.token_logprobs == [None, -0.5]


@pytest.mark.parametrize("stream", [False, True])
def test_vllms_fields_have_their_effect(served: Served, stream: bool) -> None:
    body = {
        "prompt": "hi",
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "max_tokens": 9,
        "seed": -3,
        "stream": stream,
    }
    reply = post(served.http, "/v1/completions", **body)
    choices = [event["choices"][0] for event in reply.events] if stream else reply.json["choices"]
    first, last = choices[0], choices[-1]
    assert first["prompt_logprobs"][0] is None and set(first["prompt_logprobs"][1]) == {"105", "1"}
    assert first["prompt_token_ids"] == [104, 105]
    assert bytes(i for choice in choices for i in choice["token_ids"]) == ANSWER.encode()[:9]
    assert (last["finish_reason"], last["stop_reason"], last["seed"]) == ("length", None, -3)
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_prompt_is_told_once(served: Served, stream: bool) -> None:
    body = {"messages": CHAT, "prompt_logprobs": 0, "return_token_ids": True, "n": 2, "stream": stream}
    reply = post(served.http, "/v1/chat/completions", **body)
    bodies = reply.events if stream else [reply.json]
    told = [body for body in bodies if "prompt_token_ids" in body]
    assert len(told) == 1 and len(told[0]["prompt_token_ids"]) == len(told[0]["prompt_logprobs"]) > 2


def test_a_stop_id_and_a_stop_string_are_told(served: Served) -> None:
    for field, value in (("stop_token_ids", [ord("r")]), ("stop", ["ris"])):
        for stream in (False, True):
            reply = post(served.http, "/v1/completions", prompt="x", stream=stream, **{field: value})
            choice = (reply.events[-1] if stream else reply.json)["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", value[0])


def test_special_tokens_of_a_prompt_can_be_left_out(served: Served, engine: StubEngine) -> None:
    post(served.http, "/v1/completions", prompt="x", add_special_tokens=False)
    assert engine.requests[-1].prompt_ids == (ord("x"),)


def test_the_user_is_logged_with_the_engines_id(
    served: Served, engine: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "jaxserve"):
        assert post(served.http, "/v1/completions", prompt="x", user="ada\n").status == 200
    told = [record.getMessage() for record in caplog.records if "user" in record.getMessage()]
    assert told == [f"{engine.requests[-1].id} is of user 'ada\\n'"]


def test_harmless_fields_are_taken_where_they_change_nothing(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="stub",
        messages=CHAT,
        store=False,
        service_tier="auto",
        modalities=["text"],
        max_completion_tokens=3,  # pyright: ignore
    )


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": 101}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"best_of": 2}, openai.BadRequestError, "best_of"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"extra_body": {"guided_regex": "x"}}, openai.BadRequestError, "guided_regex"),
    ],
)
def test_errors_are_the_clients_own_kinds(
    client: openai.OpenAI, fields: dict, kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": "stub", "prompt": "x", **fields})
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert caught.value.request_id is not None


def test_a_100_mb_body_is_413_to_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="stub", prompt="x" * 100_000_000)
    assert caught.value.status_code == 413 and len(caught.value.message) < 300


def test_a_streams_error_raises_in_the_client(client: openai.OpenAI) -> None:
    asked = {"model": "stub", "prompt": "x", "stream": True, "extra_body": {"ignore_eos": True, "timeout": 0.05}}
    with pytest.raises(openai.APIError, match="deadline"):
        list(client.completions.create(**asked, max_tokens=500))


def test_many_async_calls_and_a_stream_that_is_closed(served: Served, engine: StubEngine) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
            calls = [client.completions.create(model="stub", prompt=f"{i}", max_tokens=100) for i in range(20)]
            assert {answer.choices[0].text for answer in await asyncio.gather(*calls)} == {ANSWER}
            stream = await client.chat.completions.create(
                model="stub",
                messages=CHAT,
                stream=True,
                extra_body={"ignore_eos": True},  # pyright: ignore
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(ask())
    until(lambda: engine.running == 0, seconds=1)


# -- vLLM's text endpoints ---------------------------------------------------------------------------------------------


def test_texts_and_ids_go_both_ways(served: Served) -> None:
    reply = post(served.http, "/tokenize", prompt="hé", return_token_strs=True).json
    assert reply == {"count": 3, "max_model_len": 512, "tokens": [104, 195, 169], "token_strs": ["h", "�", "�"]}
    assert post(served.http, "/detokenize", tokens=[104, 195, 169]).json == {"prompt": "hé"}
    assert post(served.http, "/detokenize", tokens=[104, IM_END]).json == {"prompt": "h<|im_end|>"}
    assert post(served.http, "/detokenize", tokens=[104, IM_END], skip_special_tokens=True).json == {"prompt": "h"}
    chat = post(served.http, "/tokenize", messages=CHAT, add_generation_prompt=False).json
    assert chat["tokens"][-1] == ord("\n") and chat["token_strs"] is None


def test_the_tokenizers_own_words_are_told(served: Served) -> None:
    info = send(served.http, "GET", "/tokenizer_info").json
    assert (info["bos_token"], info["bos_token_id"]) == ("<s>", BOS)
    assert (info["eos_token"], info["eos_token_ids"]) == ("<|im_end|>", [IM_END])
    assert "im_start" in info["chat_template"]
