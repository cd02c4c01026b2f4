"""The official OpenAI client against the packaged model as it is served: transformers' tokens, many streams at once, a
schema's object, and a sentence for what its template cannot do.  Real weights, float32, drafts from lookups."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

import openai
import pytest
from pydantic import BaseModel, Field

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.start import load_engine
from server.args import ServerConfig
from tests.reference import Item, load_items
from tests.server.real import until_all_pages_are_back
from tests.server.serving import Served, serving

pytestmark = pytest.mark.full

ASKED = {"temperature": 0.0, "max_tokens": 48}
EXTRA = {"ignore_eos": True, "return_token_ids": True}


class Animal(BaseModel):
    name: str = Field(max_length=20)
    legs: Literal[0, 2, 4, 6, 8]
    can_fly: bool


@pytest.fixture(scope="module")
def engine() -> Engine:
    lean = {"dtype": "float32", "slots": 16, "max_len": 1024, "accelerator": "cpu", "batch_invariant": True}
    return load_engine(EngineConfig(model="smollm2-135m-instruct", draft="ngram", speculate_tokens=3, **lean))


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    with serving(engine, ServerConfig(http_port=0)) as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Iterator[None]:
    yield
    until_all_pages_are_back(engine)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def items(shared: Path) -> list[tuple[dict, Item]]:
    path = shared / "reference" / "smollm2.json"
    return list(zip(json.loads(path.read_text())["items"], load_items(path), strict=True))


def name_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_prompts_and_chats_have_transformers_tokens(client: openai.OpenAI, items: list[tuple[dict, Item]]) -> None:
    model = name_of(client)
    for raw, item in items:
        if "messages" in raw:
            answer = client.chat.completions.create(
                model=model, messages=cast(list, raw["messages"]), extra_body=EXTRA, **ASKED
            )
        else:
            answer = client.completions.create(model=model, prompt=raw["prompt"], extra_body=EXTRA, **ASKED)
        extra, choice = answer.choices[0].model_extra, answer.choices[0]
        assert extra is not None and answer.usage is not None and choice.finish_reason == "length"
        assert tuple(extra["token_ids"][: item.sure]) == item.output_ids[: item.sure]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(item.prompt_ids), 48)


def test_streams_side_by_side_are_what_each_is_alone(
    served: Served, client: openai.OpenAI, items: list[tuple[dict, Item]]
) -> None:
    model = name_of(client)
    prompts = [list(item.prompt_ids) for _, item in items]
    alone = [
        client.completions.create(model=model, prompt=ids, extra_body={"ignore_eos": True}, **ASKED).choices[0].text
        for ids in prompts
    ]

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:

            async def read(ids: list[int]) -> str:
                stream = await client.completions.create(
                    model=model, prompt=ids, stream=True, extra_body={"ignore_eos": True}, **ASKED
                )
                return "".join([event.choices[0].text async for event in stream if event.choices])

            return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(all_at_once()) == alone


def test_a_chat_streams_its_answer_and_its_usage(client: openai.OpenAI) -> None:
    asked = {"model": name_of(client), "temperature": 0.0, "max_tokens": 64}
    messages: list = [{"role": "user", "content": "Repeat three times: the quick brown fox jumps over the lazy dog."}]
    whole = client.chat.completions.create(messages=messages, **asked)
    events = list(
        client.chat.completions.create(
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            **asked,
        )
    )
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content and events[-1].usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    accepted = whole.usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted is not None and accepted > 0  # a text that repeats its prompt


def test_an_answer_is_parsed_into_the_clients_own_class(client: openai.OpenAI) -> None:
    for animal in ("a spider", "a sparrow", "a snake"):
        answer = client.chat.completions.parse(
            model=name_of(client),
            messages=[{"role": "user", "content": f"Describe {animal} as JSON."}],
            response_format=Animal,
            temperature=0,
            max_tokens=120,
        )
        assert isinstance(answer.choices[0].message.parsed, Animal)


def test_tools_that_its_template_cannot_show_are_refused(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=name_of(client),
            messages=[{"role": "user", "content": "What time is it?"}],
            tools=[tool],  # pyright: ignore
        )
