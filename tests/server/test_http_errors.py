"""Whatever is wrong with a call over HTTP: one status, one sentence, OpenAI's shape, and nothing echoed or left behind."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from jaxserve.request import ErrorCode
from server.args import ServerConfig
from server.errors import HTTP_STATUS
from tests.server.http_client import Reply, opened, post, send
from tests.server.serving import Served, serving, until
from tests.server.stub import StubEngine

CONFIG = ServerConfig(http_port=0, max_message_mb=1, max_prompt_mb=1)
CHAT = [{"role": "user", "content": "hi"}]
ENDLESS = {"prompt": "x", "ignore_eos": True, "max_tokens": 10**6}


@pytest.fixture(scope="module")
def engine() -> StubEngine:
    return StubEngine(max_len=10**9, queue_limit=8, slots=8)


@pytest.fixture(scope="module")
def served(engine: StubEngine) -> Iterator[Served]:
    with serving(engine, CONFIG) as served:
        yield served
        assert engine.running == 0  # however the calls ended


def test_every_error_code_has_an_http_status() -> None:
    assert set(HTTP_STATUS) == set(ErrorCode) and len(set(HTTP_STATUS.values())) == len(HTTP_STATUS)


def check(reply: Reply, status: int, kind: str, code: str, param: str | None = None) -> None:
    assert (reply.status, reply.error["type"], reply.error["code"], reply.error["param"]) == (status, kind, code, param)
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/stub", 405, "method_not_allowed"),
        ("GET", "/" + "x" * 5000, 404, "not_found"),
        ("GET", "/v1/models/gpt-4", 404, "not_found"),
    ],
)
def test_paths_and_methods(served: Served, method: str, path: str, status: int, code: str) -> None:
    reply = send(served.http, method, path)
    check(reply, status, "invalid_request_error", code, "model" if "gpt" in path else None)
    assert status != 405 or reply.headers["allow"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"prompt": "x",}', "not JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "n": 1, "n": 2}', "twice"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100_000, "deep"),
        (b'{"prompt":' * 50_000, "deep"),
        (b"[]", "object"),
        (b"null", "object"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(served: Served, path: str, body: bytes, words: str) -> None:
    reply = send(served.http, "POST", path, body)
    assert reply.status == 400 and reply.error["code"] == "invalid_argument" and words in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "x", "n": 0}, "n"),
        ("/v1/completions", {"prompt": "x", "n": 129}, "n"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "stop": ["s"] * 33}, "stop"),
        ("/v1/completions", {"prompt": "x", "stop": "s" * 2000}, "stop"),
        ("/v1/completions", {"prompt": ["x", 2**70]}, "prompt[1]"),
        ("/v1/completions", {"prompt": ["x"] * 20}, "prompt"),  # more than the slots and the queue ever hold
        ("/v1/chat/completions", {"messages": CHAT, "functions": []}, "functions"),
        ("/v1/chat/completions", {"messages": CHAT * 5000}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_fields_at_fault_are_named(served: Served, path: str, fields: dict, param: str) -> None:
    check(post(served.http, path, **fields), 400, "invalid_request_error", "invalid_argument", param)


def test_an_unknown_model_is_404(served: Served) -> None:
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        fields = {"tokens": [1]} if path == "/detokenize" else {"prompt": "x"}
        check(post(served.http, path, model="gpt-4", **fields), 404, "invalid_request_error", "not_found", "model")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": ""},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-encoding": "gzip"},
    ],
)
def test_content_types_other_than_json_are_415(served: Served, headers: dict[str, str]) -> None:
    body = gzip.compress(b"{}") if "content-encoding" in headers else b'{"prompt": "x"}'
    reply = send(served.http, "POST", "/v1/completions", body, headers)
    check(reply, 415, "invalid_request_error", "unsupported_media_type")


def test_json_said_in_any_usual_way_is_taken(served: Served) -> None:
    for kind in ("application/json", "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"'):
        assert send(served.http, "POST", "/tokenize", b'{"prompt": "x"}', {"content-type": kind}).status == 200


def test_query_parameters_are_refused_where_a_body_says_it_all(served: Served) -> None:
    reply = send(served.http, "POST", "/v1/completions?stream=true", {"prompt": "x"})
    assert reply.status == 400 and "query" in reply.error["message"]


def test_a_body_of_100_mb_is_neither_read_nor_echoed(served: Served) -> None:
    """The answer comes although nothing but the head was sent, and the connection ends."""
    address = urlsplit(served.http)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000000\r\n\r\n"
        connection.sendall(head.encode() + b"{")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    status, _, rest = answer.partition(b"\r\n")
    assert b" 413 " in status and b"100000000 bytes, this server takes 1048576" in rest and len(answer) < 2000


def test_a_body_without_a_length_is_read_up_to_the_limit_only(served: Served) -> None:
    address = urlsplit(served.http)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(17):
            connection.sendall(chunk)
        assert b" 413 " in connection.recv(65536).partition(b"\r\n")[0]


def test_a_full_queue_is_429_with_a_time_to_wait(served: Served, engine: StubEngine) -> None:
    connections = [opened(served.http, "/v1/completions", ENDLESS) for _ in range(8)]
    until(lambda: engine.running == 8)
    reply = post(served.http, "/v1/completions", prompt="x")
    check(reply, 429, "rate_limit_error", "resource_exhausted")
    assert reply.headers["retry-after"] == "1"
    reply = post(served.http, "/v1/completions", prompt=["x", "y"], n=2)
    check(reply, 429, "rate_limit_error", "resource_exhausted")
    for connection in connections:
        connection.close()
    until(lambda: engine.running == 0)


def test_a_bad_prompt_among_many_refuses_the_call_before_anything_runs(served: Served, engine: StubEngine) -> None:
    before = len(engine.requests)
    check(
        post(served.http, "/v1/completions", prompt=["a", "b", ""]),
        400,
        "invalid_request_error",
        "invalid_argument",
        "prompt[2]",
    )
    # prompt_logprobs_start is past the second prompt only, which the engine's own check finds
    reply = post(
        served.http, "/v1/completions", prompt=["long enough", "b"], prompt_logprobs=1, prompt_logprobs_start=3
    )
    check(reply, 400, "invalid_request_error", "invalid_argument", "prompt_logprobs_start")
    assert len(engine.requests) == before


def test_a_timeout_ends_the_call_with_408_that_clients_do_not_repeat(served: Served, engine: StubEngine) -> None:
    reply = post(served.http, "/v1/completions", **ENDLESS, timeout=0.2)
    check(reply, 408, "timeout_error", "deadline_exceeded")
    assert reply.headers["x-should-retry"] == "false"
    until(lambda: engine.running == 0)


def test_a_timeout_of_a_stream_is_its_last_event(served: Served) -> None:
    reply = post(served.http, "/v1/completions", **ENDLESS, timeout=0.2, stream=True)
    last = reply.body.decode().split("\n\n")[-2]
    assert reply.status == 200 and json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert b"[DONE]" not in reply.body


@pytest.mark.parametrize("given", ["a-b_c.1", "x" * 256])
def test_a_sound_request_id_is_echoed_and_never_the_engines(served: Served, engine: StubEngine, given: str) -> None:
    for _ in range(2):  # a proxy's second try is no duplicate
        reply = post(served.http, "/v1/completions", {"x-request-id": given}, prompt="x")
        assert reply.status == 200 and reply.headers["x-request-id"] == given
    assert given not in engine.requests[-1].id and engine.requests[-1].id != engine.requests[-2].id


@pytest.mark.parametrize("given", ["", "x" * 257, "a b", "a\x7f", "é"])
def test_an_unsound_request_id_is_replaced(served: Served, given: str) -> None:
    reply = send(served.http, "GET", "/health", None, {"x-request-id": given})
    assert len(reply.headers["x-request-id"]) == 32 and reply.status == 200


def test_a_server_that_loads_answers_503(caplog: pytest.LogCaptureFixture) -> None:
    with serving(None, CONFIG) as served:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            reply = post(served.http, path, prompt="x")
            check(reply, 503, "server_error", "unavailable")
            assert reply.headers["retry-after"] == "5"
        for path in ("/v1/models", "/v1/models/stub", "/tokenizer_info"):
            assert send(served.http, "GET", path).status == 503
        assert send(served.http, "GET", "/health").json == {"status": "not healthy"}
        assert send(served.http, "GET", "/ready").status == 503
    assert caplog.records == []


def test_our_own_fault_is_a_500_that_tells_nothing_and_logs_once(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("secret")

    for name in ("asked_of", "body_of"):
        monkeypatch.setattr(f"server.http_generate.{name}", broken)
        reply = post(served.http, "/v1/completions", prompt="x")
        check(reply, 500, "server_error", "internal")
        monkeypatch.undo()
    monkeypatch.setattr("server.http_api.tokenizer_info", broken)
    reply = send(served.http, "GET", "/tokenizer_info")
    check(reply, 500, "server_error", "internal")
    assert "secret" not in str(reply.body)
    assert [record.getMessage() for record in caplog.records] == ["a call failed"] * 3
