"""The HTTP front over a real socket: answers, errors in OpenAI's shape, and the official client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import openai
import pytest

from server.args import ServerConfig
from tests.server.serving import Served, serving
from tests.server.stub import ANSWER, StubEngine

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


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)


def send(served: Served, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Reply:
    connection = http.client.HTTPConnection(urlsplit(served.http).netloc, timeout=10)
    try:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {} if raw is None else {"content-type": "application/json"}
        connection.request(method, path, raw, given | (headers or {}))
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, found, response.read())
    finally:
        connection.close()


def test_a_completion_and_a_chat_answer_the_official_client(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="stub", prompt="hi", max_tokens=100)
    assert completion.choices[0].text == ANSWER and completion.choices[0].finish_reason == "stop"
    chat = client.chat.completions.create(model="stub", messages=CHAT)  # pyright: ignore
    assert chat.choices[0].message.content == ANSWER


def test_streams_joined_are_the_whole_answer(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="stub", prompt=["a", "b"], n=2, max_tokens=100, stream=True)
    texts = ["", "", "", ""]
    for part in completion:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [ANSWER] * 4


def test_an_unknown_path_and_a_wrong_method_have_openais_shape(served: Served) -> None:
    reply = send(served, "GET", "/v1/nothing")
    assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
    reply = send(served, "GET", "/v1/completions")
    assert (reply.status, reply.json["error"]["code"], reply.headers["allow"]) == (405, "method_not_allowed", "POST")
