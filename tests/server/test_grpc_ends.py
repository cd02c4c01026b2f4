"""Every way a call can end before its answer is complete: the request ends too, all of its samples, at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest

from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc
from tests.server.serving import Served, serving, until
from tests.server.stub import StubEngine, StubTokenizer


@pytest.fixture
def engine() -> StubEngine:
    return StubEngine(step_seconds=0.002, max_len=10**9)  # nothing ends by itself


@pytest.fixture
def served(engine: StubEngine):
    with serving(engine) as served:
        yield served


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A call that ends early is nobody's bug: nothing is logged as one."""
    yield
    assert [record.getMessage() for record in caplog.records if record.getMessage() == "a call failed"] == []


def endless(**fields) -> pb.GenerateRequest:
    n = fields.pop("n", 1)
    return pb.GenerateRequest(text="x", params=pb.SamplingParams(ignore_eos=True, n=n), **fields)


def status(call) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError):
        list(call)
    return call.code()


def test_a_cancelled_stream_aborts_its_request_and_all_of_its_samples(served: Served, engine: StubEngine) -> None:
    call = served.stub.GenerateStream(endless(n=3))
    next(call)
    assert engine.running == 3
    call.cancel()
    until(lambda: engine.running == 0)


def test_a_cancelled_unary_call_aborts_its_request(served: Served, engine: StubEngine) -> None:
    call = served.stub.Generate.future(endless())
    until(lambda: engine.running == 1)
    call.cancel()
    until(lambda: engine.running == 0)


def test_a_call_cancelled_while_nothing_is_drawn_aborts_its_request(served: Served, engine: StubEngine) -> None:
    engine.hold()
    call = served.stub.GenerateStream(endless())
    until(lambda: engine.running == 1)
    call.cancel()
    until(lambda: engine.running == 0)


def test_a_call_cancelled_while_its_reader_is_slow_aborts_its_request() -> None:
    # More than flow control lets through unread, less than the server can translate in the same time.
    engine = StubEngine(per_step=400, step_seconds=0.002, max_len=10**9)
    with serving(engine) as served:
        call = served.stub.GenerateStream(endless())
        next(call)
        time.sleep(0.2)
        assert engine.running == 1
        call.cancel()
        until(lambda: engine.running == 0)


def test_a_client_that_is_killed_aborts_its_request(served: Served, engine: StubEngine) -> None:
    code = (
        "import sys, grpc\n"
        "from server.pb.jaxserve.v1 import generation_pb2 as pb, generation_pb2_grpc as pb_grpc\n"
        "stub = pb_grpc.GenerationStub(grpc.insecure_channel(sys.argv[1]))\n"
        "for _ in stub.GenerateStream(pb.GenerateRequest(text='x', params=pb.SamplingParams(ignore_eos=True, n=2))): pass\n"
    )
    client = subprocess.Popen([sys.executable, "-c", code, served.address])
    until(lambda: engine.running == 2, seconds=10)
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    until(lambda: engine.running == 0)


def test_the_calls_deadline_ends_the_request_itself(served: Served, engine: StubEngine) -> None:
    began = time.monotonic()
    call = served.stub.GenerateStream(endless(), timeout=0.3)
    assert status(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: engine.running == 0)
    deadline = engine.requests[-1].deadline
    assert deadline is not None and -0.05 < deadline - began - 0.3 < 2  # the call's way here may be slow


def test_no_deadline_means_none(served: Served, engine: StubEngine) -> None:
    served.stub.Generate(pb.GenerateRequest(text="x"))
    assert engine.requests[-1].deadline is None


def rest(call) -> list[pb.Output]:
    """What is left of a stream that ends with an error."""
    messages: list[pb.Output] = []
    try:
        for message in call:
            messages.append(message)
    except grpc.RpcError:
        return messages
    raise AssertionError("the stream ended well")


def test_abort_ends_a_stream_with_its_last_messages_and_cancelled(served: Served, engine: StubEngine) -> None:
    call = served.stub.GenerateStream(endless(id="mine", n=2))
    next(call)
    assert served.stub.Abort(pb.AbortRequest(id="mine")).found
    finishes = [message.finish for message in rest(call) if message.HasField("finish")]
    assert [finish.reason for finish in finishes] == [pb.FINISH_REASON_ABORT] * 2
    assert [finish.prompt_tokens for finish in finishes] == [1, 1]
    assert call.code() is grpc.StatusCode.CANCELLED
    assert not served.stub.Abort(pb.AbortRequest(id="mine")).found
    assert engine.running == 0


def test_abort_reaches_a_request_that_is_still_being_encoded() -> None:
    engine = StubEngine(tokenizer=StubTokenizer(seconds=0.3))
    with serving(engine) as served:
        call = served.stub.GenerateStream(endless(id="early"))
        until(lambda: bool(engine.tokenizer.threads))
        assert served.stub.Abort(pb.AbortRequest(id="early")).found
        assert status(call) is grpc.StatusCode.CANCELLED
        assert engine.requests == []


def test_a_call_cancelled_while_being_encoded_is_never_submitted() -> None:
    engine = StubEngine(tokenizer=StubTokenizer(seconds=0.2))
    with serving(engine) as served:
        call = served.stub.GenerateStream(endless(id="early"))
        until(lambda: bool(engine.tokenizer.threads))
        call.cancel()
        time.sleep(0.4)
        assert engine.requests == []
        assert not served.stub.Abort(pb.AbortRequest(id="early")).found


def test_an_ended_request_is_not_aborted_again(served: Served, engine: StubEngine) -> None:
    served.stub.Generate(pb.GenerateRequest(text="x"))
    list(served.stub.GenerateStream(pb.GenerateRequest(text="x")))
    assert engine.aborted == []


def test_a_drain_that_times_out_ends_streams_with_unavailable(served: Served, engine: StubEngine) -> None:
    call = served.stub.GenerateStream(endless())
    next(call)
    stopping = served.drain(0.2)
    assert status(call) is grpc.StatusCode.UNAVAILABLE
    assert stopping.result(10)
    assert engine.running == 0


def test_a_dead_loop_ends_every_stream_with_internal(served: Served, engine: StubEngine) -> None:
    calls = [served.stub.GenerateStream(endless()) for _ in range(3)]
    for call in calls:
        next(call)
    engine.die()
    assert [status(call) for call in calls] == [grpc.StatusCode.INTERNAL] * 3
    assert "poisoned" in calls[0].details()


def test_a_lost_connection_on_one_channel_leaves_the_others(served: Served, engine: StubEngine) -> None:
    with grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
        lost = pb_grpc.GenerationStub(other).GenerateStream(endless())
        next(lost)
        kept = served.stub.GenerateStream(endless())
        next(kept)
        assert engine.running == 2
    until(lambda: engine.running == 1)
    next(kept)
    kept.cancel()
