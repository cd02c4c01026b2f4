"""A real server process under load: it is killed and starts again, it is soaked, and it is asked to leave."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from scripts.soak_parts.asks import Ask, random_ask
from scripts.soak_parts.book import CHECKS, Book
from scripts.soak_parts.clients import Told
from scripts.soak_parts.process import ServerProcess
from scripts.soak_parts.run import soak
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc
from tests.server.http_client import fetch
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
SMALL = (
    "--accelerator=cpu", "--slots=4", "--page-size=16", "--prefill-chunk=64", "--prefill-tokens=64", "--pool=800",
    "--batch-invariant", "--no-access-log",
)  # fmt: skip
VOCAB, LONGEST = 400, 700


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return (f"--model={write_tiny_model(tmp_path_factory.mktemp('tiny') / 'tiny')}", *SMALL)


@pytest.fixture
def server(flags: tuple[str, ...]) -> Iterator[ServerProcess]:
    started = ServerProcess.start(flags, seconds=120)
    yield started
    started.process.kill()
    started.process.wait()


def streams(address: str, count: int) -> tuple[grpc.Channel, list]:
    """Open streams that have begun and will take a while."""
    channel = grpc.insecure_channel(address)
    request = pb.GenerateRequest(text="the quick", params=pb.SamplingParams(max_tokens=700, ignore_eos=True))
    calls = [pb_grpc.GenerationStub(channel).GenerateStream(request) for _ in range(count)]
    for call in calls:
        next(call)
    return channel, calls


def test_killed_under_load_it_starts_again_warm_and_leaves_in_peace(flags: tuple[str, ...]) -> None:
    """kill -9, then a start that compiles nothing; SIGTERM under load, then what was accepted is finished."""
    first = ServerProcess.start(flags, seconds=120)
    channel, calls = streams(first.grpc, 4)
    first.process.kill()
    first.process.wait()
    for call in calls:
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    channel.close()

    again = ServerProcess.start(flags, seconds=120)
    try:
        assert any("(0 compiled, the rest from the cache)" in line for line in again.lines)
        channel, calls = streams(again.grpc, 4)
        waiting = [pb_grpc.GenerationStub(channel).GenerateStream(pb.GenerateRequest(text="x")) for _ in range(4)]
        for call in waiting:
            call.initial_metadata()  # queued, and no more
        events = http_stream(again.http)
        again.process.send_signal(signal.SIGTERM)
        until_refused(channel)
        late = fetch(again.http, "/v1/completions", {"prompt": "x"})
        assert late.status == 503 and late.json["error"]["code"] == "unavailable"
        for call in (*calls, *waiting):
            assert list(call)[-1].finish.reason in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP)
        with events:
            assert events.read().endswith(b"data: [DONE]\n\n")
        assert again.process.wait(20) == 0
        channel.close()
    finally:
        again.process.kill()
        again.process.wait()


def http_stream(base: str) -> http.client.HTTPResponse:
    """A stream that has been accepted."""
    body = {"prompt": "x", "max_tokens": 50, "stream": True}
    headers = {"content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(f"{base}/v1/completions", json.dumps(body).encode(), headers))


def until_refused(channel: grpc.Channel) -> None:
    """New requests, until one is told that the server shuts down."""
    one = pb.GenerateRequest(text="x", params=pb.SamplingParams(max_tokens=1))
    end = time.monotonic() + 5
    call = pb_grpc.GenerationStub(channel).Generate.future(one)
    while call.code() is grpc.StatusCode.OK and time.monotonic() < end:
        call = pb_grpc.GenerationStub(channel).Generate.future(one)
    assert call.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in call.details()


def test_a_short_soak_keeps_every_promise(server: ServerProcess) -> None:
    """Four slots, a pool of one sequence at its longest, 24 clients."""
    told, found = soak(server, requests=240, clients=24, seed=1)
    assert [check for check in found if not check.holds] == []
    assert {(result.ask.front, result.ask.way) for result in told} >= {
        ("grpc", "finish"), ("grpc", "leave"), ("grpc", "deadline"), ("grpc", "abort"), ("http", "finish"),
        ("http", "leave"), ("http", "abort"),
    }  # fmt: skip


@pytest.mark.full
def test_two_thousand_requests_of_64_clients_on_real_weights() -> None:
    """The soak as an operator runs it."""
    command = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--", "--slots=16", "--max-len=1024", "--pool=8192"]
    result = subprocess.run([*command, "--no-access-log"], capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout


# -- the soak's own judgement ------------------------------------------------------------------------------------------


def test_the_same_number_asks_the_same_and_ids_stay_in_the_vocabulary() -> None:
    asks = [random_ask(number, 3, vocab=VOCAB, max_len=LONGEST) for number in range(300)]
    assert asks == [random_ask(number, 3, vocab=VOCAB, max_len=LONGEST) for number in range(300)]
    assert all(0 <= token < VOCAB for ask in asks for token in ask.prompt)
    assert {ask.way for ask in asks if ask.front == "http"} == {"finish", "leave", "abort"}


def numbers(**changes: float) -> dict[str, float]:
    """Of a server at rest that has served one request of one sequence."""
    found = {
        f'jaxserve:request_success_total{{finished_reason="{reason}"}}': 0.0 for reason in ("stop", "abort", "error")
    }
    found |= {f'jaxserve:kv_cache_pages{{state="{state}"}}': 5.0 for state in ("free", "cached", "held")}
    names = ("requests_total", "sequences_total", "prompt_tokens_total", "generation_tokens_total", "nan_rows_total",
             "compiles_total", "request_generation_tokens_sum")  # fmt: skip
    counts = ("e2e_request_latency_seconds_count", "request_generation_tokens_count", "request_prompt_tokens_count")
    found |= {f"jaxserve:{name}": 0.0 for name in (*names, *counts)}
    found |= {'jaxserve:request_success_total{finished_reason="length"}': 0.0, "process_resident_memory_bytes": 1e8}
    return found | changes


SERVED = numbers(**{
    "jaxserve:requests_total": 1, "jaxserve:sequences_total": 1, "jaxserve:prompt_tokens_total": 1,
    "jaxserve:generation_tokens_total": 4, "jaxserve:request_generation_tokens_sum": 4,
    "jaxserve:e2e_request_latency_seconds_count": 1, "jaxserve:request_generation_tokens_count": 1,
    "jaxserve:request_prompt_tokens_count": 1, 'jaxserve:request_success_total{finished_reason="length"}': 1,
})  # fmt: skip


def book(*, last: dict[str, float] | None = None, exit_code: int = 0, **told: object) -> Book:
    ask = Ask(number=0, front="grpc", way="finish", patience=0, seconds=1.0, prompt=(7,), params={})
    result = Told(ask, **({"status": "OK", "is_accepted": True, "ends": [0], "tokens": 4} | told))  # type: ignore[arg-type]
    return Book(told=[result], first=numbers(), warm=SERVED, last=SERVED | (last or {}), exit_code=exit_code)


def broken(found: Book) -> set[str]:
    return {check.__name__ for check in CHECKS if not check(found).holds}


def test_a_book_in_order_breaks_no_promise() -> None:
    assert broken(book()) == set()


@pytest.mark.parametrize(
    ("changed", "promise"),
    [
        ({"jaxserve:sequences_total": 2}, "sequences_end_once"),
        ({'jaxserve:request_success_total{finished_reason="error"}': 1}, "nothing_fails"),
        ({"jaxserve:nan_rows_total": 1}, "nothing_fails"),
        ({"jaxserve:requests_total": 2}, "requests_add_up"),
        ({"jaxserve:requests_total": 0}, "requests_add_up"),
        ({"jaxserve:prompt_tokens_total": 3}, "prompt_tokens_add_up"),
        ({"jaxserve:generation_tokens_total": 3}, "tokens_add_up"),
        ({"jaxserve:e2e_request_latency_seconds_count": 2}, "histograms_add_up"),
        ({"jaxserve:request_generation_tokens_sum": 0}, "counters_never_fall"),
        ({'jaxserve:kv_cache_pages{state="free"}': 4}, "pages_come_back"),
        ({"jaxserve:compiles_total": 1}, "nothing_is_compiled"),
        ({"process_resident_memory_bytes": 1e8 + 65 * 2**20}, "memory_is_flat"),
    ],
)
def test_every_number_that_is_wrong_breaks_its_promise(changed: dict[str, float], promise: str) -> None:
    assert promise in broken(book(last=changed))


def test_a_client_s_complaint_and_an_exit_code_break_their_promises() -> None:
    assert broken(book(faults=["a sample ended twice"])) == {"clients_are_content"}
    assert broken(book(exit_code=1)) == {"it_leaves_in_peace"}
