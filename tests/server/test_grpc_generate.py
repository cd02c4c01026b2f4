"""What a client gets: answers, streams, counts, and an error with a status and a field for everything else."""

from __future__ import annotations

import threading

import grpc
import pytest

from jaxserve.request import RequestError
from server.args import ServerConfig
from server.errors import clear_message
from server.pb.jaxserve.v1 import generation_pb2 as pb
from tests.server.serving import Served, serving, until
from tests.server.stub import ANSWER, IM_END, StubEngine, StubTokenizer


@pytest.fixture(scope="module")
def engine() -> StubEngine:
    return StubEngine(step_seconds=0.001)


@pytest.fixture(scope="module")
def served(engine: StubEngine):
    with serving(engine) as served:
        yield served


def ask(text: str = "hi", **params) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, params=pb.SamplingParams(**params))


def refusal(call) -> tuple[grpc.StatusCode, str, str]:
    """-> (status, details, field at fault) of a call that fails."""

    def whole() -> None:
        response = call()
        if isinstance(response, grpc.Call):
            list(response)

    with pytest.raises(grpc.RpcError) as caught:
        whole()
    error = caught.value
    return error.code(), error.details(), dict(error.trailing_metadata()).get("jaxserve-field", "")


# -- answers -----------------------------------------------------------------------------------------------------------


def test_unary_answers_with_text_counts_and_seed(served: Served) -> None:
    response = served.stub.Generate(ask("hello", seed=7))
    (output,) = response.outputs
    assert output.text == ANSWER and list(output.token_ids) == [*ANSWER.encode(), IM_END]
    finish = output.finish
    assert finish.reason == pb.FINISH_REASON_STOP and finish.WhichOneof("matched_stop") is None
    assert (finish.prompt_tokens, finish.completion_tokens) == (5, len(ANSWER.encode()) + 1)
    assert (finish.cached_tokens, finish.drafted_tokens, finish.accepted_tokens, finish.seed) == (3, 2, 1, 7)


def test_deltas_joined_are_the_unary_text(served: Served) -> None:
    messages = list(served.stub.GenerateStream(ask(ignore_eos=True, max_tokens=90)))
    whole = served.stub.Generate(ask(ignore_eos=True, max_tokens=90)).outputs[0]
    assert len(messages) > 3
    assert "".join(message.text for message in messages) == whole.text
    assert [i for message in messages for i in message.token_ids] == list(whole.token_ids)


def test_usage_comes_once_in_the_last_message_of_each_sample(served: Served) -> None:
    messages = list(served.stub.GenerateStream(ask(n=3)))
    by_index: dict[int, list[pb.Output]] = {}
    for message in messages:
        by_index.setdefault(message.index, []).append(message)
    assert sorted(by_index) == [0, 1, 2]
    for parts in by_index.values():
        assert [part.HasField("finish") for part in parts] == [False] * (len(parts) - 1) + [True]
        assert "".join(part.text for part in parts) == ANSWER


def test_n_samples_come_back_by_index(served: Served) -> None:
    outputs = served.stub.Generate(ask(n=4, max_tokens=5)).outputs
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert all(output.finish.reason == pb.FINISH_REASON_LENGTH for output in outputs)


def test_the_matched_stop_is_told(served: Served) -> None:
    by_string = served.stub.Generate(ask(stop=["naïve", "The"])).outputs[0]
    assert by_string.text == " Paris, " and by_string.finish.stop_string == "naïve"
    by_id = served.stub.Generate(ask(stop_token_ids=[ord(",")])).outputs[0]
    assert by_id.finish.stop_id == ord(",") and by_id.finish.reason == pb.FINISH_REASON_STOP


def test_logprobs_and_prompt_logprobs_travel(served: Served) -> None:
    messages = list(served.stub.GenerateStream(ask("hello", max_tokens=3, logprobs=2, prompt_logprobs=1)))
    assert sum(len(message.logprobs) for message in messages) == 3
    assert len(messages[0].prompt_logprobs) == 5 and not messages[0].prompt_logprobs[0].HasField("logprob")
    assert not any(message.prompt_logprobs for message in messages[1:])
    entry = messages[0].logprobs[0]
    assert list(entry.top_ids) == [1, 2] and entry.token_bytes == b" "


def test_ids_only_when_detokenize_is_off(served: Served) -> None:
    output = served.stub.Generate(ask(detokenize=False, max_tokens=4)).outputs[0]
    assert output.text == "" and len(output.token_ids) == 4


def test_token_ids_and_chat_are_prompts_too(served: Served, engine: StubEngine) -> None:
    served.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])))
    assert engine.requests[-1].prompt_ids == (1, 2, 3)
    served.stub.Generate(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])))
    assert engine.requests[-1].prompt_ids[0] == 256


def test_an_id_is_drawn_when_none_is_given_and_told_before_the_first_token(served: Served, engine: StubEngine) -> None:
    engine.hold()
    call = served.stub.GenerateStream(ask())
    told = dict(call.initial_metadata())["jaxserve-request-id"]
    engine.release()
    assert len(told) == 32 and {message.id for message in call} == {told}


def test_text_is_encoded_in_worker_threads_only(served: Served, engine: StubEngine) -> None:
    served.stub.Generate(ask("hello"))
    assert engine.tokenizer.threads and all(name.startswith("jaxserve-text") for name in engine.tokenizer.threads)


def test_tokenize_and_detokenize(served: Served) -> None:
    assert list(served.stub.Tokenize(pb.TokenizeRequest(text="hé")).token_ids) == list("hé".encode())
    assert served.stub.Tokenize(pb.TokenizeRequest(text="x", add_bos=True)).token_ids[0] == 258
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    assert served.stub.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids[0] == 256
    ids = [*"hé".encode(), IM_END]
    assert served.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "hé"
    kept = served.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False))
    assert kept.text == "hé<|im_end|>"


def test_model_info_and_load(served: Served) -> None:
    info = served.stub.ModelInfo(pb.ModelInfoRequest())
    assert info.name == "stub" and info.max_len == 512 and info.max_samples == 128 and info.has_chat_template
    assert served.stub.Load(pb.LoadRequest()).slots == 32


# -- refusals ----------------------------------------------------------------------------------------------------------

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (ask(""), "text"),
        (pb.GenerateRequest(chat=pb.Chat()), "messages"),
        (ask(stop=[""]), "stop"),
        (ask(stop=["x"], detokenize=False), "stop"),
        (ask(temperature=-1), "temperature"),
        (ask(top_k=-2), "top_k"),
        (ask(stop_token_ids=[2_000_000_000]), "stop_token_ids"),
        (ask(logit_bias={300: 1.0}), "logit_bias"),
        (ask(allowed_token_ids=[-1]), "allowed_token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 300])), "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "prompt"),
        (ask("x" * 512), "prompt"),
        (pb.GenerateRequest(text="x", id="i" * 257), "id"),
    ],
)
def test_a_bad_field_is_refused_by_name_on_both_methods(
    served: Served, request_: pb.GenerateRequest, field: str
) -> None:
    code, details, named = refusal(lambda: served.stub.Generate(request_))
    assert (code, named) == (INVALID, field) and field in details
    assert refusal(lambda: served.stub.GenerateStream(request_)) == (code, details, named)


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(served: Served) -> None:
    _, details, _ = refusal(lambda: served.stub.Generate(ask("x" * 512)))
    assert "512 tokens" in details and "holds 512" in details


def test_a_refused_request_leaves_its_neighbours_alone(served: Served) -> None:
    calls = [served.stub.Generate.future(ask("" if i == 1 else "x", max_tokens=5)) for i in range(4)]
    assert [call.code() for call in calls] == [grpc.StatusCode.OK, INVALID, grpc.StatusCode.OK, grpc.StatusCode.OK]


def test_top_k_off_and_other_legal_edges_are_served(served: Served) -> None:
    for params in ({"top_k": -1}, {"top_k": 10_000}, {"top_p": 1.0}, {"temperature": 0.0}, {"logprobs": 0}):
        assert served.stub.Generate(ask(max_tokens=1, **params)).outputs


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda stub: stub.Tokenize(pb.TokenizeRequest()), "prompt"),
        (lambda stub: stub.Tokenize(pb.TokenizeRequest(text="")), "text"),
        (lambda stub: stub.Tokenize(pb.TokenizeRequest(chat=pb.Chat(), add_bos=True)), "add_bos"),
        (lambda stub: stub.Detokenize(pb.DetokenizeRequest(token_ids=[300])), "token_ids"),
        (lambda stub: stub.Detokenize(pb.DetokenizeRequest(token_ids=range(600))), "token_ids"),
        (lambda stub: stub.Abort(pb.AbortRequest()), "id"),
    ],
)
def test_the_small_calls_refuse_by_name_too(served: Served, call, field: str) -> None:
    assert refusal(lambda: call(served.stub))[::2] == (INVALID, field)


def test_the_same_id_twice_is_refused_and_the_first_goes_on(served: Served, engine: StubEngine) -> None:
    engine.hold()
    first = served.stub.Generate.future(pb.GenerateRequest(id="same", text="x"))
    until(lambda: engine.running == 1)
    code, _, field = refusal(lambda: served.stub.Generate(pb.GenerateRequest(id="same", text="x")))
    engine.release()
    assert (code, field) == (grpc.StatusCode.ALREADY_EXISTS, "id")
    assert first.result().outputs[0].text == ANSWER
    assert served.stub.Generate(pb.GenerateRequest(id="same", text="x")).outputs  # and it may be used again


def test_the_same_id_is_refused_while_the_first_is_still_being_encoded() -> None:
    engine = StubEngine(tokenizer=StubTokenizer(seconds=0.3))
    with serving(engine) as served:
        first = served.stub.Generate.future(pb.GenerateRequest(id="same", text="x"))
        until(lambda: bool(engine.tokenizer.threads))
        second = refusal(lambda: served.stub.Generate(pb.GenerateRequest(id="same", text="x")))
        assert second[0] is grpc.StatusCode.ALREADY_EXISTS
        assert first.result().outputs


def test_a_full_queue_is_resource_exhausted() -> None:
    with serving(StubEngine(queue_limit=3)) as served:
        code, details, _ = refusal(lambda: served.stub.Generate(ask(n=4)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "queue" in details


def test_calls_that_wait_to_be_encoded_count_as_open() -> None:
    engine = StubEngine(queue_limit=1, slots=2, tokenizer=StubTokenizer(seconds=0.2))
    with serving(engine, ServerConfig(tokenizer_threads=1)) as served:
        calls = [served.stub.Generate.future(ask()) for _ in range(5)]
        codes = [call.code() for call in calls]
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= 2
        assert served.stub.Generate(ask()).outputs  # and they count no longer


def test_a_server_that_loads_is_unavailable() -> None:
    with serving(None) as served:
        code, details, _ = refusal(lambda: served.stub.Generate(ask()))
        assert code is grpc.StatusCode.UNAVAILABLE and "loading" in details
        assert refusal(lambda: served.stub.ModelInfo(pb.ModelInfoRequest()))[0] is grpc.StatusCode.UNAVAILABLE


def test_a_bug_is_internal_and_tells_nothing_of_the_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StubEngine()
    monkeypatch.setattr(engine, "submit", lambda request: 1 / 0)
    with serving(engine) as served:
        code, details, _ = refusal(lambda: served.stub.Generate(ask()))
        assert code is grpc.StatusCode.INTERNAL and "zero" not in details


def test_a_huge_value_is_not_echoed_back(served: Served) -> None:
    request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="🫠" * 100_000, content="x")]))
    code, details, _ = refusal(lambda: served.stub.Generate(request))
    assert code is INVALID and len(details) < 1000
    assert len(clear_message(RequestError("🫠" * 10**6))) < 600


# -- message limits ----------------------------------------------------------------------------------------------------


def test_messages_over_the_stated_limit_are_refused_and_those_below_are_served() -> None:
    config = ServerConfig(max_message_mb=5, max_prompt_mb=5)
    with serving(StubEngine(max_len=3_000_000), config) as served:
        assert served.stub.ModelInfo(pb.ModelInfoRequest()).max_message_bytes == 5 * 2**20
        big = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[200] * 2_200_000))  # 4.4 MB: over gRPC's own default
        big.params.max_tokens = 1
        assert served.stub.Generate(big).outputs[0].finish.prompt_tokens == 2_200_000
        too_big = pb.GenerateRequest(text="x" * (5 * 2**20 + 10))
        assert refusal(lambda: served.stub.Generate(too_big))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_calls_at_once_each_get_their_own_answer(served: Served) -> None:
    answers: dict[int, int] = {}

    def one(count: int) -> None:
        answers[count] = len(served.stub.Generate(ask(ignore_eos=True, max_tokens=count)).outputs[0].token_ids)

    threads = [threading.Thread(target=one, args=(count,)) for count in range(1, 33)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {count: count for count in range(1, 33)}


def test_an_id_that_no_header_carries_is_no_fault_of_ours(served: Served) -> None:
    assert list(served.stub.GenerateStream(pb.GenerateRequest(id="\x1fü", text="x")))[-1].id == "\x1fü"


def test_bytes_that_are_no_message_are_refused_as_the_callers_fault(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for method in ("Generate", "Abort", "ModelInfo"):
        with pytest.raises(grpc.RpcError) as error:
            served.channel.unary_unary(f"/jaxserve.v1.Generation/{method}")(b"\xff", timeout=10)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(error.value.trailing_metadata())["jaxserve-code"] == "invalid_argument"
    assert caplog.records == []
