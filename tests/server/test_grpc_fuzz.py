"""Whatever the proto lets a client send to the real engine ends once, with a status that is not our fault, and leaves
every page free."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.engine import Engine
from server.args import ServerConfig
from server.pb.jaxserve.v1 import generation_pb2 as pb
from tests.server.proto_cases import METHODS, PATIENCE, Call, calls
from tests.server.real import tiny_engine, until_all_pages_are_back
from tests.server.serving import Served, serving

CONFIG = ServerConfig(http_port=-1, max_message_mb=1, max_prompt_mb=1)
BURST = 4  # calls at a time: they meet in a batch, in their ids, and in aborts of each other
Code = grpc.StatusCode
GENERATE = ("Generate", "GenerateStream")
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    with serving(engine, CONFIG) as served:
        yield served


def answered(channel: grpc.Channel, call: Call) -> tuple[grpc.StatusCode, list[Message]]:
    """-> how the call ended, and what came before that."""
    kind = GetMessageClass(call.method.output_type)
    messages: list[Message] = []
    if call.method.server_streaming:
        stream = channel.unary_stream(call.path)(call.body, timeout=call.timeout)
        try:
            for message in stream:
                messages.append(kind.FromString(message))
                if call.is_left:
                    stream.cancel()
        except grpc.RpcError:
            pass
        return stream.code(), messages
    future = channel.unary_unary(call.path).future(call.body, timeout=call.timeout)
    if call.is_left:
        future.cancel()
        return Code.CANCELLED, []
    if future.exception() is None:
        messages.append(kind.FromString(future.result()))
    return future.code(), messages


def allowed(call: Call, burst: list[Call]) -> set[grpc.StatusCode]:
    codes = {Code.OK, Code.INVALID_ARGUMENT}
    if call.timeout < PATIENCE:
        codes.add(Code.DEADLINE_EXCEEDED)
    if call.is_left or (call.method.name in GENERATE and any(other.method.name == "Abort" for other in burst)):
        codes.add(Code.CANCELLED)
    if call.method.name in GENERATE:
        codes |= {Code.ALREADY_EXISTS, Code.RESOURCE_EXHAUSTED}
    return codes


def check_endings(call: Call, messages: list[Message]) -> None:
    """Every sample of an answered request ended once, and said nothing after."""
    params = pb.GenerateRequest.FromString(call.body).params
    endings: Counter[int] = Counter()
    for output in (part for message in messages for part in getattr(message, "outputs", [message])):
        assert not endings[output.index], output
        if output.HasField("finish"):
            endings[output.index] += 1
            assert output.finish.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH), output
    assert endings == Counter(range(params.n if params.HasField("n") else 1))


def fuzz(served: Served, engine: Engine, count: int, logged: pytest.LogCaptureFixture) -> None:
    seen: Counter[tuple[str, grpc.StatusCode]] = Counter()

    @settings(max_examples=count // BURST, suppress_health_check=SLOW, database=None, deadline=None)
    @given(burst=st.lists(calls(), min_size=BURST, max_size=BURST))
    def run(burst: list[Call]) -> None:
        answers = list(pool.map(lambda call: answered(served.channel, call), burst))
        for call, (code, messages) in zip(burst, answers, strict=True):
            assert code in allowed(call, burst), (call, code)
            if call.method.name in GENERATE and code is Code.OK:
                check_endings(call, messages)
            seen[call.method.name, code] += 1
        until_all_pages_are_back(engine)

    with ThreadPoolExecutor(BURST) as pool:
        run()
    assert seen.total() >= count
    assert [record for record in logged.records if record.levelno >= logging.ERROR] == []
    for method in METHODS:  # it reached what it fuzzes
        assert {Code.OK, Code.INVALID_ARGUMENT} <= {code for name, code in seen if name == method.name}, seen


def test_nothing_that_the_proto_can_think_of_is_our_fault(
    served: Served, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    fuzz(served, engine, 1000, caplog)


@pytest.mark.full
def test_ten_thousand_such_calls(served: Served, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    fuzz(served, engine, 10_000, caplog)
