"""TLS and mutual TLS: both fronts speak it, and only it; the client script does too."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from server.args import ServerConfig
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc
from tests.server.certificates import Authority, Pair
from tests.server.http_client import fetch
from tests.server.processes import script
from tests.server.serving import Served, serving
from tests.server.stub import ANSWER, StubEngine

ASK = pb.GenerateRequest(text="x")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def client(authority: Authority) -> Pair:
    return authority.sign("client", usage="clientAuth")


@pytest.fixture(scope="module", params=["tls", "mutual"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(authority: Authority, mode: str) -> Iterator[Served]:
    pair = authority.sign("server")
    client_ca = authority.pair.cert if mode == "mutual" else None
    config = ServerConfig(http_port=0, metrics_port=0, tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=client_ca)
    with serving(StubEngine(), config) as served:
        yield served


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def generate(served: Served, credentials: grpc.ChannelCredentials | None) -> str:
    if credentials is None:
        channel = grpc.insecure_channel(served.address)
    else:
        channel = grpc.secure_channel(served.address, credentials)
    with channel:
        return pb_grpc.GenerationStub(channel).Generate(ASK, timeout=5).outputs[0].text


def context(authority: Authority, pair: Pair | None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=authority.pair.cert)
    if pair is not None:
        made.load_cert_chain(pair.cert, pair.key)
    return made


def test_a_client_with_all_it_needs_is_served(served: Served, authority: Authority, client: Pair) -> None:
    credentials = grpc.ssl_channel_credentials(read(authority.pair.cert), read(client.key), read(client.cert))
    assert generate(served, credentials) == ANSWER
    reply = fetch(served.http, "/v1/completions", {"prompt": "x", "max_tokens": 100}, tls=context(authority, client))
    assert reply.json["choices"][0]["text"] == ANSWER


def test_a_client_s_certificate_is_asked_for_in_mutual_tls_alone(
    served: Served, authority: Authority, mode: str
) -> None:
    credentials = grpc.ssl_channel_credentials(read(authority.pair.cert))
    if mode == "tls":
        assert generate(served, credentials) == ANSWER
        assert fetch(served.http, "/health", tls=context(authority, None)).status == 200
        return
    with pytest.raises(grpc.RpcError) as caught:
        generate(served, credentials)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises((ssl.SSLError, ConnectionError)):
        fetch(served.http, "/health", tls=context(authority, None))


def test_a_client_of_another_authority_stays_outside(
    served: Served, authority: Authority, mode: str, tmp_path: Path
) -> None:
    stranger = Authority.make(tmp_path / "strangers", "strangers").sign("client", usage="clientAuth")
    credentials = grpc.ssl_channel_credentials(read(authority.pair.cert), read(stranger.key), read(stranger.cert))
    if mode == "tls":  # nobody looks at it
        assert generate(served, credentials) == ANSWER
        return
    with pytest.raises(grpc.RpcError):
        generate(served, credentials)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        fetch(served.http, "/health", tls=context(authority, stranger))


def test_nobody_is_served_in_plain_text(served: Served) -> None:
    with pytest.raises(grpc.RpcError):
        generate(served, None)
    with pytest.raises((ConnectionError, OSError)):
        fetch(served.http.replace("https", "http"), "/health")


def test_probes_and_scrapers_need_no_tls_at_their_own_port(served: Served) -> None:
    assert fetch(served.metrics, "/health").status == fetch(served.metrics, "/metrics").status == 200


def test_the_client_script_speaks_tls(served: Served, authority: Authority, client: Pair, mode: str) -> None:
    flags = ["--address", served.address, "--tls-ca", authority.pair.cert]
    known = script("generate.py", *flags, "--tls-cert", client.cert, "--tls-key", client.key, "x")
    assert (known.returncode, known.stdout, known.stderr) == (0, f"{ANSWER}\n", "")
    if mode == "mutual":
        unknown = script("generate.py", *flags, "x")
        assert unknown.returncode == 1 and "--tls-cert" in unknown.stderr and unknown.stderr.count("\n") == 1
    untrusting = script("generate.py", "--address", served.address, "--tls", "x")
    assert untrusting.returncode == 1 and "CERTIFICATE_VERIFY_FAILED" in untrusting.stderr
    plain = script("generate.py", "--address", served.address, "x")
    assert plain.returncode == 1 and "it wants TLS" in plain.stderr


def test_the_client_script_sends_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1")
    keys.chmod(0o600)
    with serving(StubEngine(), ServerConfig(http_port=-1, api_key_file=str(keys))) as served:
        flags = ["--address", served.address, "x"]
        refused = script("generate.py", *flags)
        assert refused.returncode == 1 and "a valid API key is needed" in refused.stderr
        assert script("generate.py", *flags, "--api-key-file", str(keys)).returncode == 0
        monkeypatch.setitem(os.environ, "JAXSERVE_API_KEY", "sk-1")
        monkeypatch.setattr("tests.server.processes.ENVIRONMENT", dict(os.environ))
        assert script("generate.py", *flags).returncode == 0


def test_half_of_a_client_s_pair_is_a_wrong_flag(client: Pair) -> None:
    result = script("generate.py", "--tls-cert", client.cert, "x")
    assert result.returncode == 2 and "go together" in result.stderr
