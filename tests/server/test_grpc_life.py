"""The service's own life: health, reflection, keepalive, drain, a loop that hangs or dies, start and stop."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from server.app import PING_INTERVAL_MS, App, channel_options
from server.args import ServerConfig
from server.pb.jaxserve.v1 import generation_pb2 as pb
from tests.server.serving import Served, serving, until
from tests.server.stub import ANSWER, StubEngine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ENDLESS = pb.GenerateRequest(text="x", params=pb.SamplingParams(ignore_eos=True))


def health(served: Served, service: str = "") -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(service=service)).status


def test_health_serves_once_an_engine_is_attached() -> None:
    with serving(None) as served:
        assert health(served) == health(served, "jaxserve.v1.Generation") == NOT_SERVING
        engine = StubEngine()
        engine.start()
        served.call(served.app.attach(engine))
        assert health(served) == health(served, "jaxserve.v1.Generation") == SERVING


def test_health_follows_a_loop_that_hangs_and_beats_again() -> None:
    engine = StubEngine()
    with serving(engine) as served:
        engine.hang(True)
        until(lambda: health(served) == NOT_SERVING)
        engine.hang(False)
        until(lambda: health(served) == SERVING)


def test_a_dead_loop_turns_health_off_and_is_reported() -> None:
    engine = StubEngine()
    with serving(engine) as served:
        engine.die()
        served.call(served.app.failed(), timeout=5)
        assert health(served) == NOT_SERVING
        served.call(served.app.stop(0))
        with pytest.raises(grpc.RpcError) as caught:
            served.stub.Generate(ENDLESS)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_reflection_describes_the_service() -> None:
    with serving(StubEngine()) as served:
        database = ProtoReflectionDescriptorDatabase(served.channel)
        assert {"jaxserve.v1.Generation", "grpc.health.v1.Health"} <= set(database.get_services())
        described = database.FindFileContainingSymbol("jaxserve.v1.Generation")
        methods = {method.name for method in described.service[0].method}
        assert methods == {"Generate", "GenerateStream", "Abort", "Tokenize", "Detokenize", "ModelInfo", "Load"}
        assert described.package == "jaxserve.v1"


# -- keepalive ---------------------------------------------------------------------------------------------------------


def pings(served: Served, interval_ms: int) -> grpc.Channel:
    options = [
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.insecure_channel(served.address, options=options)


def watch(channel: grpc.Channel) -> list[grpc.ChannelConnectivity]:
    """The states that an idle channel goes through from now on, as they come."""
    states: list[grpc.ChannelConnectivity] = []
    grpc.channel_ready_future(channel).result(5)
    channel.subscribe(states.append)
    return states


def test_pings_every_ten_seconds_are_half_of_what_the_server_bears() -> None:
    options = dict(channel_options(ServerConfig()))
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == PING_INTERVAL_MS <= 5_000
    assert options["grpc.keepalive_permit_without_calls"] == 1


def test_an_idle_channel_that_pings_is_kept() -> None:
    """Ten times faster than life: a client that pings every second (gRPC's minimum), a server that bears one every
    half.  Beside it the same client at a server that bears one every five: dropped, so the test can fail."""
    with (
        serving(StubEngine(), options=channel_options(ServerConfig(), ping_interval_ms=500)) as patient,
        serving(StubEngine()) as strict,
        pings(patient, 1000) as kept,
        pings(strict, 1000) as dropped,
    ):
        kept_states, dropped_states = watch(kept), watch(dropped)
        until(lambda: len(dropped_states) > 1, seconds=8)
        time.sleep(0.3)
        assert kept_states == [grpc.ChannelConnectivity.READY]


@pytest.mark.full
def test_an_idle_channel_that_pings_every_ten_seconds_is_kept_for_minutes() -> None:
    with serving(StubEngine()) as served, pings(served, 10_000) as channel:
        states = watch(channel)
        time.sleep(150)
        assert states == [grpc.ChannelConnectivity.READY]


# -- drain -------------------------------------------------------------------------------------------------------------


def test_a_drain_finishes_what_runs_and_refuses_what_is_new() -> None:
    engine = StubEngine(step_seconds=0.005)
    with serving(engine) as served:
        engine.hold()
        running = served.stub.GenerateStream(pb.GenerateRequest(text="x"))
        until(lambda: engine.running == 1)
        stopping = served.drain(10)
        until(lambda: engine.is_draining)
        assert health(served) == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            served.stub.Generate(pb.GenerateRequest(text="x"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in caught.value.details()
        engine.release()
        assert "".join(message.text for message in running) == ANSWER
        assert stopping.result(10)


def test_a_health_watcher_does_not_hold_up_the_drain() -> None:
    with serving(StubEngine()) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(watch).status == SERVING
        began = time.monotonic()
        served.drain(10).result(10)
        assert time.monotonic() - began < 2


# -- start -------------------------------------------------------------------------------------------------------------


def test_two_services_in_turn_in_one_process() -> None:
    engine = StubEngine()
    for _ in range(2):  # the same engine, stopped and started again
        with serving(engine) as served:
            assert served.stub.Generate(pb.GenerateRequest(text="x")).outputs[0].text == ANSWER


async def start(port: int) -> None:
    await App(ServerConfig(port=port)).start()


def test_a_port_in_use_is_one_clear_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1 port {port}: Address already in use"):
            asyncio.run(start(port))


def test_two_servers_never_share_a_port() -> None:
    with serving(StubEngine()) as served:
        port = int(served.address.rpartition(":")[2])
        with pytest.raises(ValueError, match="in use"):
            asyncio.run(start(port))


def test_importing_the_service_touches_no_device() -> None:
    code = "import sys, server.main, server.openai_schema, server.batch_files; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
