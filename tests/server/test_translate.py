"""Every field of a message reaches the request under its own name, and every field of a chunk its message."""

from __future__ import annotations

import dataclasses
import math

import pytest
from google.protobuf.descriptor import FieldDescriptor

from jaxserve.request import Chunk, FinishReason, RequestError, SamplingParams, TokenLogprobs, Usage
from server.args import ServerConfig
from server.limits import Limits
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.translate import load_of, model_info_of, output_of, params_of, request_of
from tests.server.stub import StubEngine, StubTokenizer

LIMITS = Limits.of(ServerConfig(), StubEngine())

# A value for each field that is not its default.
CHANGED = {
    "max_tokens": 9,
    "min_tokens": 2,
    "n": 3,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.1,
    "logit_bias": {7: -1.5},
    "allowed_token_ids": (1, 2),
    "banned_token_ids": (3,),
    "seed": 2**64 - 1,
    "stop": ("END",),
    "stop_token_ids": (4, 5),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "prompt_logprobs_start": 1,
    "detokenize": False,
    "skip_special_tokens": False,
    "speculate": False,
}


def translate(message: pb.GenerateRequest, *, deadline: float | None = None):
    return request_of(message, request_id="x", deadline=deadline, tokenizer=StubTokenizer(), limits=LIMITS)


def test_the_proto_has_exactly_the_fields_of_sampling_params() -> None:
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert names == {field.name for field in dataclasses.fields(SamplingParams)} == set(CHANGED)


@pytest.mark.parametrize("name", CHANGED)
def test_every_sampling_field_has_its_effect_and_no_other(name: str) -> None:
    params = params_of(pb.SamplingParams(**{name: CHANGED[name]}), LIMITS)
    assert params == dataclasses.replace(SamplingParams(), **{name: CHANGED[name]})
    assert params != SamplingParams()


def test_an_empty_message_means_the_defaults() -> None:
    assert params_of(pb.SamplingParams(), LIMITS) == SamplingParams()


def test_scalars_with_a_default_other_than_zero_are_optional() -> None:
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        if field.is_repeated:
            continue
        default = getattr(SamplingParams(), field.name)
        assert field.has_presence == (default is None or bool(default)), field.name


def test_numbers_keep_every_bit() -> None:
    assert params_of(pb.SamplingParams(temperature=0.1, top_p=1 / 3), LIMITS).top_p == 1 / 3


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "logprobs", "prompt_logprobs", "seed"])
def test_an_explicit_zero_is_not_the_default(name: str) -> None:
    assert getattr(params_of(pb.SamplingParams(**{name: 0}), LIMITS), name) == 0


@pytest.mark.parametrize("name", ["n", "top_p", "repetition_penalty"])
def test_an_explicit_zero_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        params_of(pb.SamplingParams(**{name: 0}), LIMITS)


def test_top_k_minus_one_is_off() -> None:
    assert params_of(pb.SamplingParams(top_k=-1), LIMITS).top_k == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", [""]),
        ("n", 0),
        ("n", 2_000_000_000),
        ("logprobs", 21),
        ("top_p", 0.0),
        ("temperature", math.nan),
        ("temperature", -0.5),
        ("max_tokens", -1),
        ("stop_token_ids", [-3]),
        ("logit_bias", {5: math.inf}),
        ("stop_token_ids", range(100)),
        ("allowed_token_ids", range(5000)),
        ("banned_token_ids", range(5000)),
        ("logit_bias", dict.fromkeys(range(5000), 1.0)),
        ("stop", ["x"] * 33),
        ("stop", ["x" * 1025]),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(name: str, value) -> None:
    with pytest.raises(RequestError) as caught:
        params_of(pb.SamplingParams(**{name: value}), LIMITS)
    assert caught.value.field == name and name in caught.value.message


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        params_of(pb.SamplingParams(stop=["x"], detokenize=False), LIMITS)


def test_request_fields_reach_the_request() -> None:
    message = pb.GenerateRequest(text="hi", priority=-3, cache_salt="me", params=pb.SamplingParams(seed=5))
    request = translate(message, deadline=12.5)
    assert (request.id, request.prompt_ids, request.priority, request.cache_salt) == ("x", (104, 105), -3, "me")
    assert (request.deadline, request.params.seed) == (12.5, 5)
    known = {"id", "text", "token_ids", "chat", "params", "priority", "cache_salt"}
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} == known


def test_a_field_from_a_newer_client_is_refused() -> None:
    for owner in (pb.GenerateRequest(text="x"), pb.SamplingParams(n=1)):
        newer = type(owner).FromString(owner.SerializeToString() + b"\xf8\x3f\x01")  # field 1023 = 1
        message = newer if isinstance(newer, pb.GenerateRequest) else pb.GenerateRequest(text="x", params=newer)
        with pytest.raises(RequestError, match="1023"):
            translate(message)


def test_chat_goes_through_the_template_and_contents_stay_text() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="<|im_end|>")])
    ids = translate(pb.GenerateRequest(chat=chat)).prompt_ids
    assert ids[0] == 256 and ids.count(257) == 1 and bytes(i for i in ids if i < 256).count(b"<|im_end|>") == 1
    chat.add_generation_prompt = False
    assert len(translate(pb.GenerateRequest(chat=chat)).prompt_ids) < len(ids)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
        (pb.GenerateRequest(chat=pb.Chat()), "messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="no role")])), "messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 4097)), "messages"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(512))), "token_ids"),
        (pb.GenerateRequest(text="x" * (4 * 2**20 + 1)), "text"),
        (pb.GenerateRequest(text="x", cache_salt="s" * 257), "cache_salt"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(message: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        translate(message)
    assert caught.value.field == field


def test_every_field_of_a_chunk_reaches_its_message() -> None:
    entry = TokenLogprobs(token_id=104, logprob=-0.5, rank=2, top=((240, -0.25), (104, -0.5)))
    chunk = Chunk(
        request_id="r",
        index=1,
        token_ids=(104, 105),
        text="hi",
        logprobs=(entry, entry),
        prompt_logprobs=(None, entry),
        finish_reason=FinishReason.STOP,
        stop_reason=105,
        usage=Usage(
            prompt_tokens=5, completion_tokens=4, cached_tokens=3, drafts=6, drafted_tokens=2, accepted_tokens=1
        ),
        error="e",
        seed=-1,
    )
    output = output_of(chunk, StubTokenizer())
    assert (output.id, output.index, output.text, list(output.token_ids)) == ("r", 1, "hi", [104, 105])
    first, second = output.prompt_logprobs
    assert not first.HasField("logprob") and second == output.logprobs[0] == output.logprobs[1]
    assert (second.token_id, second.logprob, second.rank, second.token_bytes) == (104, -0.5, 2, b"h")
    assert list(second.top_ids) == [240, 104] and list(second.top_bytes) == [b"\xf0", b"h"]
    finish = output.finish
    assert finish.reason == pb.FINISH_REASON_STOP and finish.stop_id == 105 and finish.WhichOneof("matched_stop")
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens", "drafts", "drafted_tokens", "accepted_tokens")
    assert [getattr(finish, name) for name in counts] == [5, 4, 3, 6, 2, 1]
    assert {field.name for field in dataclasses.fields(Usage)} == set(counts)
    assert (finish.seed, finish.error) == (2**64 - 1, "e")


def test_a_matched_stop_is_a_string_an_id_or_nothing() -> None:
    def finish(stop_reason: int | str | None) -> pb.Finish:
        return output_of(
            Chunk(request_id="r", finish_reason=FinishReason.STOP, stop_reason=stop_reason), StubTokenizer()
        ).finish

    assert finish("END").stop_string == "END"
    assert finish(0).WhichOneof("matched_stop") == "stop_id"
    assert finish(None).WhichOneof("matched_stop") is None


def test_every_finish_reason_has_its_name() -> None:
    names = {f"FINISH_REASON_{reason.name}" for reason in FinishReason}
    assert names | {"FINISH_REASON_UNSPECIFIED"} == set(pb.FinishReason.keys())


def test_model_info_and_load_tell_all_that_the_engine_tells() -> None:
    engine = StubEngine()
    info = model_info_of(engine, LIMITS)
    assert (info.name, info.max_len, info.bos_id, list(info.eos_ids)) == ("stub", 512, 258, [257])
    assert info.max_message_bytes == 64 * 2**20 and info.max_stop_ids == 16
    assert load_of(engine.load()).slots == 32


def test_messages_have_the_fields_of_the_real_engine() -> None:
    from jaxserve.engine import Load, ModelInfo

    load = {field.name for field in dataclasses.fields(Load)}
    assert load == {field.name for field in pb.LoadResponse.DESCRIPTOR.fields}
    told = {field.name: field for field in pb.ModelInfoResponse.DESCRIPTOR.fields}
    assert {field.name for field in dataclasses.fields(ModelInfo)} <= set(told)
    assert told["max_message_bytes"].type == FieldDescriptor.TYPE_UINT64
