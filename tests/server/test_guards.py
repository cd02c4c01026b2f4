"""Keys at both fronts: what is locked is locked for every method, and what must stay open is open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from server.args import ServerConfig
from server.pb.jaxserve.v1 import generation_pb2 as pb
from tests.server.http_client import fetch
from tests.server.serving import Served, serving
from tests.server.stub import ANSWER, StubEngine

USER, SCRAPER = "sk-user", "sk-scraper"
AUTHORIZED = (("authorization", f"Bearer {USER}"),)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    files: dict[str, Path] = {name: folder / name for name in ("users", "scrapers")}
    for path, key in zip(files.values(), (USER, SCRAPER), strict=True):
        path.write_text(f"{key}\nanother\n")
        path.chmod(0o600)
    config = ServerConfig(
        http_port=0, metrics_port=0, api_key_file=str(files["users"]), metrics_key_file=str(files["scrapers"])
    )
    with serving(StubEngine(), config) as served:
        yield served


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_user_s_key_opens_both_fronts(served: Served) -> None:
    answer = served.stub.Generate(pb.GenerateRequest(text="x"), metadata=AUTHORIZED)
    assert answer.outputs[0].text == ANSWER
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key=USER, max_retries=0) as client:
        assert client.completions.create(model="stub", prompt="x", max_tokens=100).choices[0].text == ANSWER


@pytest.mark.parametrize(
    "metadata", [(), (("authorization", "Bearer nope"),), (("authorization", f"Bearer {SCRAPER}"),)]
)
def test_grpc_refuses_every_method_without_a_user_s_key(served: Served, metadata) -> None:
    methods = [
        (served.stub.Generate, pb.GenerateRequest(text="x")),
        (served.stub.Abort, pb.AbortRequest(id="x")),
        (served.stub.Tokenize, pb.TokenizeRequest(text="x")),
        (served.stub.Detokenize, pb.DetokenizeRequest(token_ids=[1])),
        (served.stub.ModelInfo, pb.ModelInfoRequest()),
        (served.stub.Load, pb.LoadRequest()),
    ]
    assert len(methods) + 1 == len(pb.DESCRIPTOR.services_by_name["Generation"].methods)
    calls = [method.with_call for method, _ in methods]
    for call, (_, request) in zip(calls, methods, strict=True):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED and "API key" in caught.value.details()
    stream = served.stub.GenerateStream(pb.GenerateRequest(text="x"), metadata=metadata)
    with pytest.raises(grpc.RpcError):
        list(stream)
    assert stream.code() is grpc.StatusCode.UNAUTHENTICATED


def test_reflection_is_locked_and_health_is_not(served: Served) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as caught:
        list(reflection.ServerReflectionInfo(iter([request])))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    (answer,) = reflection.ServerReflectionInfo(iter([request]), metadata=AUTHORIZED)
    assert "jaxserve.v1.Generation" in {service.name for service in answer.list_services_response.service}
    health = health_pb2_grpc.HealthStub(served.channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
    assert next(health.Watch(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


def test_an_unknown_method_tells_a_stranger_nothing(served: Served) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        served.channel.unary_unary("/jaxserve.v1.Generation/Secret")(b"")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("headers", [{}, bearer("nope"), bearer(SCRAPER), {"authorization": f"Basic {USER}"}])
def test_http_refuses_every_path_without_a_user_s_key(served: Served, headers: dict[str, str]) -> None:
    paths = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/tokenizer_info",
             "/openapi.json", "/nothing", "/v1", "//health", "/health/", "/HEALTH", "/health/../v1/models"]  # fmt: skip
    for path in paths:
        for method in ("GET", "POST"):
            reply = fetch(served.http, path, method=method, headers=headers)
            assert reply.status == 401, path
    assert reply.headers["www-authenticate"] == "Bearer" and reply.headers["x-request-id"]
    assert reply.json["error"]["code"] == "invalid_api_key" and reply.json["error"]["type"] == "authentication_error"


def test_the_page_opens_without_a_key_and_leads_nowhere_else(served: Served) -> None:
    assert fetch(served.http, "/").status != 401
    for path in ("/page/nothing.js", "/page/../v1/models", "/page/%2e%2e/v1/models", "/page//v1/models"):
        assert fetch(served.http, path).status == 404


def test_the_official_client_sees_an_authentication_error(served: Served) -> None:
    with (
        openai.OpenAI(base_url=f"{served.http}/v1", api_key="nope", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_probes_need_no_key(served: Served) -> None:
    for base in (served.http, served.metrics):
        for path in ("/health", "/ready"):
            assert fetch(base, path).status == 200


def test_metrics_open_to_scrapers_and_users_and_to_nobody_else(served: Served) -> None:
    for key, base, status in (
        (SCRAPER, served.http, 200), (USER, served.http, 200), ("nope", served.http, 401),
        (SCRAPER, served.metrics, 200), (USER, served.metrics, 401),
    ):  # fmt: skip
        reply = fetch(base, "/metrics", headers=bearer(key))
        assert reply.status == status, (key, base)
        assert status != 200 or b"jaxserve:num_requests_running" in reply.body
    assert fetch(served.http, "/metrics").status == fetch(served.metrics, "/metrics").status == 401


def test_the_metrics_port_serves_nothing_else(served: Served) -> None:
    for path in ("/v1/models", "/v1/completions", "/openapi.json", "/"):
        assert fetch(served.metrics, path, headers=bearer(SCRAPER)).status == 404


def test_without_a_key_of_its_own_the_metrics_port_is_open(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(USER)
    users.chmod(0o600)
    with serving(StubEngine(), ServerConfig(http_port=0, metrics_port=0, api_key_file=str(users))) as served:
        assert fetch(served.metrics, "/metrics").status == 200
        assert fetch(served.http, "/metrics").status == 401
