"""Every way an HTTP call can end before its answer is complete: its requests end too, all prompts and samples, at once."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest

from server.args import ServerConfig
from server.pb.jaxserve.v1 import generation_pb2 as pb
from tests.server.http_client import opened, post, send
from tests.server.processes import read_until, serving_process
from tests.server.serving import Served, serving, until
from tests.server.stub import ANSWER, StubEngine, StubTokenizer

CONFIG = ServerConfig(http_port=0)
ENDLESS = {"prompt": "x", "ignore_eos": True, "max_tokens": 10**6}
CHAT = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}


@pytest.fixture
def engine() -> StubEngine:
    return StubEngine(step_seconds=0.002, max_len=10**9)  # nothing ends by itself


@pytest.fixture
def served(engine: StubEngine) -> Iterator[Served]:
    with serving(engine, CONFIG) as served:
        yield served


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A call that ends early is nobody's bug: nothing is logged as one."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v1/completions", {**ENDLESS, "n": 2}, 2),
        ("/v1/completions", {**ENDLESS, "n": 2, "stream": True}, 2),
        ("/v1/completions", {**ENDLESS, "prompt": ["x", "y", "z"], "n": 2}, 6),
        ("/v1/completions", {**ENDLESS, "prompt": ["x", "y", "z"], "n": 2, "stream": True}, 6),
        ("/v1/chat/completions", CHAT, 1),
        ("/v1/chat/completions", {**CHAT, "stream": True}, 1),
    ],
)
@pytest.mark.parametrize("is_held", [False, True])
def test_a_client_that_goes_away_aborts_all_of_its_requests(
    served: Served, engine: StubEngine, path: str, body: dict, sequences: int, is_held: bool
) -> None:
    if is_held:  # nothing is drawn: no write can find out that nobody reads
        engine.hold()
    with opened(served.http, path, body):
        until(lambda: engine.running == sequences)
    until(lambda: engine.running == 0, seconds=1)


def test_a_client_that_stops_reading_has_its_chunks_merged_and_is_aborted_when_it_goes(
    served: Served, engine: StubEngine
) -> None:
    with opened(served.http, "/v1/completions", {**ENDLESS, "stream": True}) as connection:
        assert connection.recv(1000)
        time.sleep(0.3)
        assert engine.running == 1
    until(lambda: engine.running == 0, seconds=1)


def test_a_client_that_goes_while_its_prompt_is_encoded_is_never_submitted() -> None:
    engine = StubEngine(tokenizer=StubTokenizer(seconds=0.2))
    with serving(engine, CONFIG) as served:
        with opened(served.http, "/v1/completions", ENDLESS):
            until(lambda: bool(engine.tokenizer.threads))
        time.sleep(0.4)
        assert engine.requests == []


def last_event(body: bytes) -> dict:
    assert b"[DONE]" not in body  # it is not
    return json.loads(body.decode().split("\n\n")[-2].removeprefix("data: "))


def test_a_dead_loop_is_a_500_or_the_last_event_of_a_stream(served: Served, engine: StubEngine) -> None:
    with (
        opened(served.http, "/v1/completions", ENDLESS) as whole,
        opened(served.http, "/v1/completions", {**ENDLESS, "stream": True}) as stream,
    ):
        until(lambda: engine.running == 2)
        engine.die()
        assert b" 500 " in whole.recv(100)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):  # the body's own end: the connection could serve on
            received += stream.recv(65536)
    assert b'data: {"error":{"message":"poisoned","type":"server_error","param":null,"code":"internal"}}' in received
    until(lambda: send(served.http, "GET", "/health").status == 503)
    assert post(served.http, "/v1/completions", **ENDLESS).status == 500


def test_one_samples_failure_ends_the_call_and_its_mates(served: Served, engine: StubEngine) -> None:
    """Aborted over gRPC by the engine's id, which a stream's id tells."""
    body = {**ENDLESS, "prompt": ["x", "y"], "stream": True}
    with opened(served.http, "/v1/completions", body) as connection:
        until(lambda: engine.running == 2)
        assert served.stub.Abort(pb.AbortRequest(id=engine.requests[-1].id)).found
        until(lambda: engine.running == 0, seconds=1)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
    assert b'"code":"cancelled"' in received


def test_health_follows_the_loop_and_ready_the_drain(engine: StubEngine) -> None:
    with serving(engine, CONFIG) as served:
        states = [send(served.http, "GET", path).status for path in ("/health", "/ready")]
        assert states == [200, 200]
        engine.hang(True)
        assert [send(served.http, "GET", path).status for path in ("/health", "/ready")] == [503, 503]
        engine.hang(False)
        engine.hold()
        with opened(served.http, "/v1/completions", ENDLESS):
            until(lambda: engine.running == 1)
            stopping = served.drain(10)
            until(lambda: engine.is_draining)
            assert [send(served.http, "GET", path).status for path in ("/health", "/ready")] == [200, 503]
            assert post(served.http, "/v1/completions", prompt="x").status == 503
        assert stopping.result(10)


def test_one_sigterm_drains_both_fronts_and_the_exit_is_0() -> None:
    with serving_process("--step-seconds", "0.02") as server:
        with opened(server.http, "/v1/completions", {"prompt": "x", "max_tokens": 100, "stream": True}) as connection:
            received = connection.recv(65536)
            server.process.send_signal(signal.SIGTERM)
            read_until(server.process.stderr, "draining")
            until(lambda: post(server.http, "/v1/completions", prompt="x").status == 503)
            while part := connection.recv(65536):
                received += part
        texts = [
            json.loads(line[6:])["choices"][0]["text"] for line in received.decode().split("\r\n") if "choices" in line
        ]
        assert "".join(texts) == ANSWER and b"[DONE]" in received
        assert server.process.wait(10) == 0


def test_what_runs_past_the_drain_timeout_ends_with_an_event(served: Served, engine: StubEngine) -> None:
    with opened(served.http, "/v1/completions", {**ENDLESS, "stream": True}) as connection:
        received = connection.recv(65536)
        stopping = served.drain(0.2)
        while part := connection.recv(65536):
            received += part
        assert stopping.result(10)
    assert b'"code":"unavailable"' in received and b"[DONE]" not in received


def test_an_idle_connection_does_not_hold_up_the_drain(served: Served) -> None:
    with opened(served.http, "/tokenize", {"prompt": "x"}) as connection:
        assert connection.recv(100)
        began = time.monotonic()
        served.drain(10).result(10)
        assert time.monotonic() - began < 2


def test_a_port_in_use_is_one_clear_sentence(served: Served) -> None:
    port = int(served.http.rpartition(":")[2])
    with pytest.raises(ValueError, match=f"127.0.0.1 port {port}: Address already in use .*--http-port"):
        served.call(_start(ServerConfig(port=0, http_port=port)))


async def _start(config: ServerConfig) -> None:
    from server.app import App

    app = App(config)
    try:
        await app.start()
    finally:
        await app.stop(0)


def test_the_http_front_can_be_off(engine: StubEngine) -> None:
    with serving(engine, ServerConfig(http_port=-1)) as served:
        assert served.http == ""
        assert served.stub.Generate(pb.GenerateRequest(text="x")).outputs[0].text == ANSWER
