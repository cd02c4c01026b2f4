"""The serving process: signals, exit codes, and one clear sentence for the operator."""

from __future__ import annotations

import re
import signal
import socket
import time

import grpc
import pytest

from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc
from tests.server.processes import read_until, script, start, stub_server

ENDLESS = pb.GenerateRequest(text="x", params=pb.SamplingParams(ignore_eos=True))


def stub_of(address: str) -> pb_grpc.GenerationStub:
    return pb_grpc.GenerationStub(grpc.insecure_channel(address))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_what_runs_and_exits_0(number: signal.Signals) -> None:
    with stub_server("--step-seconds", "0.02") as (process, address):
        call = stub_of(address).GenerateStream(pb.GenerateRequest(text="x"))
        messages = [next(call)]
        process.send_signal(number)
        messages.extend(call)
        assert messages[-1].finish.reason == pb.FINISH_REASON_STOP
        assert process.wait(10) == 0


def test_what_runs_past_the_drain_timeout_is_aborted_and_the_exit_is_0() -> None:
    with stub_server("--step-seconds", "0.02", flags=["--drain-timeout", "0.3"]) as (process, address):
        call = stub_of(address).GenerateStream(ENDLESS)
        next(call)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(10) == 0


def test_a_second_ctrl_c_ends_at_once() -> None:
    with stub_server("--step-seconds", "0.02") as (process, address):
        call = stub_of(address).GenerateStream(ENDLESS)
        next(call)
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "draining")
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == 130


def test_a_dead_loop_ends_the_process_with_1() -> None:
    with stub_server("--step-seconds", "0.02", "--die-after", "0.7") as (process, address):
        call = stub_of(address).GenerateStream(ENDLESS)
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.INTERNAL
        assert process.wait(10) == 1


def test_a_signal_while_the_model_loads_ends_at_once_with_0() -> None:
    process = start(
        [
            "-m",
            "tests.server.run_stub",
            "--load-seconds",
            "60",
            "--",
            "--port",
            "0",
            "--http-port",
            "0",
            "--log-level",
            "debug",
        ]
    )
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode in (0, -signal.SIGTERM)  # the latter when the signal came before the handler


def test_a_model_that_cannot_be_served_is_one_sentence_and_exits_2() -> None:
    process = start(
        ["-m", "tests.server.run_stub", "--load-error", "no such\nmodel", "--", "--port", "0", "--http-port", "0"]
    )
    out, error = process.communicate(timeout=15)
    assert process.returncode == 2
    assert (out, error) == ("", "serve: no such model\n")


def test_a_port_in_use_exits_2_before_any_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = script("serve.py", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 2
    assert re.fullmatch(r"serve: cannot listen on 127.0.0.1 port \d+: Address already in use .*\n", result.stderr)


def test_a_wrong_flag_exits_2_with_one_sentence() -> None:
    result = script("serve.py", "--slots", "0")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1) and "slots=0" in result.stderr


def test_help_is_grouped_and_quick() -> None:
    began = time.monotonic()
    result = script("serve.py", "--help")
    assert result.returncode == 0 and time.monotonic() - began < 10
    assert [word for word in ("model:", "memory:", "scheduling:", "service:") if word in result.stdout.split()] == [
        "model:", "memory:", "scheduling:", "service:",
    ]  # fmt: skip
