"""The access log, CORS and traces: one record a call at either front, and no word of a prompt in any of them."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import pytest

from server.args import ServerConfig
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.records import Record, access_line
from server.tracing import Tracer
from tests.server.http_client import fetch
from tests.server.serving import Served, serving, until
from tests.server.stub import StubEngine

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, SPAN = bytes.fromhex(PARENT[3:35]), bytes.fromhex(PARENT[36:52])
SECRET = "a whispered word"


@pytest.fixture(scope="module")
def engine() -> StubEngine:
    return StubEngine()


@pytest.fixture(scope="module")
def served(engine: StubEngine) -> Iterator[Served]:
    with serving(engine, ServerConfig(http_port=0, cors_origins="https://chat.example")) as served:
        yield served


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "jaxserve.access"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "jaxserve.access"]


def test_a_grpc_call_is_one_line(served: Served, lines) -> None:
    request = pb.GenerateRequest(id="mine", text=SECRET, params=pb.SamplingParams(max_tokens=5, n=2))
    served.stub.Generate(request, metadata=(("x-request-id", "edge-7"),))
    until(lambda: lines() != [])
    (line,) = lines()
    wanted = (
        r"grpc /jaxserve\.v1\.Generation/Generate OK x-request-id=edge-7 id=mine prompt_tokens=16 completion_tokens=10"
        r" finish=length seconds=\d+\.\d{3}"
    )
    assert re.fullmatch(wanted, line)


def test_an_http_call_is_one_line(served: Served, lines) -> None:
    body = {"prompt": [SECRET, SECRET], "max_tokens": 5, "stream": True}
    fetch(served.http, "/v1/completions", body, headers={"x-request-id": "edge-8"})
    until(lambda: lines() != [])
    (line,) = lines()
    wanted = (
        r"http POST /v1/completions 200 x-request-id=edge-8 id=\S+ requests=2 prompt_tokens=32 completion_tokens=10"
        r" finish=length seconds=\d+\.\d{3}"
    )
    assert re.fullmatch(wanted, line)


def test_what_is_refused_or_left_is_logged_as_that(served: Served, engine: StubEngine, lines) -> None:
    with pytest.raises(grpc.RpcError):
        served.stub.Generate(pb.GenerateRequest(text=SECRET, params=pb.SamplingParams(top_p=7)))
    fetch(served.http, "/v1/completions", {"prompt": SECRET, "top_p": 7})
    fetch(served.http, f"/nowhere?key={SECRET.replace(' ', '+')}")
    call = served.stub.GenerateStream(pb.GenerateRequest(text=SECRET, params=pb.SamplingParams(ignore_eos=True)))
    next(call)
    call.cancel()
    until(lambda: len(lines()) == 4)
    statuses = [line.split(" id=")[0].split(" x-request-id")[0] for line in lines()]
    assert statuses[0].startswith("grpc /jaxserve.v1.Generation/Generate INVALID_ARGUMENT")
    assert statuses[1:3] == ["http POST /v1/completions 400", "http GET /nowhere 404"]
    assert statuses[3] == "grpc /jaxserve.v1.Generation/GenerateStream CANCELLED"
    assert not any("whispered" in line for line in lines())


def test_probes_and_scrapes_are_not_logged(served: Served, lines) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert fetch(served.http, path).status == 200
    fetch(served.http, "/v1/models")
    until(lambda: lines() != [])
    assert len(lines()) == 1


def test_without_the_flag_nothing_is_logged(lines) -> None:
    with serving(StubEngine(), ServerConfig(http_port=0, access_log=False)) as served:
        served.stub.Generate(pb.GenerateRequest(text="x"))
        fetch(served.http, "/v1/models")
    assert lines() == []


def test_no_caller_breaks_a_line() -> None:
    record = Record(
        front="http", route="GET /a\r\nb\x1b[31m", status="200", x_request_id="ü" * 500, request_ids=["a\nb"]
    )
    line = access_line(record)
    assert line.isascii() and line.isprintable() and len(line) < 1200


# -- CORS --------------------------------------------------------------------------------------------------------------


def preflight(served: Served, origin: str) -> dict[str, str]:
    headers = {"origin": origin, "access-control-request-method": "POST",
               "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    return fetch(served.http, "/v1/completions", method="OPTIONS", headers=headers).headers


def test_pages_of_a_named_origin_may_call_and_others_may_not(served: Served) -> None:
    allowed = preflight(served, "https://chat.example")
    assert allowed["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in allowed["access-control-allow-headers"].lower()
    assert "access-control-allow-origin" not in preflight(served, "https://elsewhere.example")
    answer = fetch(served.http, "/v1/models", headers={"origin": "https://chat.example"}).headers
    assert answer["access-control-allow-origin"] == "https://chat.example"


def test_cors_is_off_unless_an_origin_is_named() -> None:
    with serving(StubEngine(), ServerConfig(http_port=0)) as served:
        assert "access-control-allow-origin" not in preflight(served, "https://chat.example")
        answer = fetch(served.http, "/v1/models", headers={"origin": "https://chat.example"})
        assert answer.status == 200 and "access-control-allow-origin" not in answer.headers


# -- traces ------------------------------------------------------------------------------------------------------------


class Collector:
    """An OTLP collector of a test's own."""

    def __init__(self) -> None:
        trace_service = pytest.importorskip(
            "opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc", reason="the extra [tracing] is not here"
        )
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        self.spans: list[Span] = []
        outer = self

        class Service(trace_service.TraceServiceServicer):
            def Export(self, request, context):
                outer.spans += [
                    span
                    for resource in request.resource_spans
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
                return trace_service_pb2.ExportTraceServiceResponse()

        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service.add_TraceServiceServicer_to_server(Service(), self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture(scope="module")
def spans() -> Sequence[Span]:
    """Of a gRPC call with a parent, and of an HTTP call with one and one without."""
    collector = Collector()
    config = ServerConfig(http_port=0, otlp_endpoint=f"http://127.0.0.1:{collector.port}")
    with serving(StubEngine(), config) as served:
        request = pb.GenerateRequest(id="traced", text=SECRET, params=pb.SamplingParams(max_tokens=5, n=2))
        served.stub.Generate(request, metadata=(("traceparent", PARENT),))
        fetch(served.http, "/v1/completions", {"prompt": SECRET, "max_tokens": 4}, headers={"traceparent": PARENT})
        fetch(served.http, "/v1/completions", {"prompt": SECRET, "max_tokens": 3})
    collector.stop()  # stopping the server has sent everything
    return collector.spans


def attributes(span: Span) -> dict[str, str | int | float]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_a_call_is_one_span_below_the_caller_s(spans: Sequence[Span]) -> None:
    names = [span.name for span in spans]
    assert names == ["/jaxserve.v1.Generation/Generate", "POST /v1/completions", "POST /v1/completions"]
    for span in spans[:2]:
        assert (span.trace_id, span.parent_span_id) == (TRACE, SPAN)
    assert spans[2].trace_id != TRACE and not spans[2].parent_span_id


def test_a_span_tells_tokens_and_times(spans: Sequence[Span]) -> None:
    found = attributes(spans[0])
    assert found["gen_ai.usage.prompt_tokens"] == 16 and found["gen_ai.usage.completion_tokens"] == 10
    assert found["gen_ai.request.id"] == "traced" and found["gen_ai.response.finish_reasons"] == "length,length"
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    assert found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert attributes(spans[2])["gen_ai.usage.completion_tokens"] == 3


def test_a_span_s_events_lie_within_it_and_in_order(spans: Sequence[Span]) -> None:
    span = spans[1]
    assert [event.name for event in span.events] == ["queued", "prefill", "decode", "ended"]
    moments = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events), span.end_time_unix_nano]
    assert moments == sorted(moments)


def test_no_span_holds_a_word_of_the_prompt(spans: Sequence[Span]) -> None:
    assert not any(SECRET in str(span) for span in spans)


def test_the_flag_without_the_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"otlp_endpoint=.* pip install 'jaxserve\[tracing\]'"):
        Tracer("http://localhost:4317")


def test_an_endpoint_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="must begin with http:// or https://"):
        Tracer("localhost:4317")
