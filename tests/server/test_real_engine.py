"""The service around the real engine: the same tokens as in process, and every page back however a call ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.start import load_engine
from server.pb.jaxserve.v1 import generation_pb2 as pb
from tests.reference import PARAMS, assert_matches, load_items
from tests.server.serving import Served, serving, until
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")
    small = {"slots": 8, "page_size": 16, "prefill_chunk": 32, "prefill_tokens": 32, "pool": "4096", "max_len": 512}
    return EngineConfig(model=str(folder), accelerator="cpu", batch_invariant=True, **small)  # one shape of each kind


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Engine:
    return load_engine(config)


@pytest.fixture
def served(engine: Engine) -> Iterator[Served]:
    with serving(engine) as served:  # started and stopped around every test
        yield served


def ask(ids: list[int], **params) -> pb.GenerateRequest:
    params = {"temperature": 0, "max_tokens": 20, "ignore_eos": True} | params
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), params=pb.SamplingParams(**params))


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(3, 400, length).tolist() for length in rng.integers(1, 200, count)]


def check_idle(served: Served) -> None:
    def is_idle() -> bool:
        load = served.stub.Load(pb.LoadRequest())
        return (
            load.running == load.waiting == load.pages_held == 0
            and load.pages_free + load.pages_cached == load.pages_total
        )

    until(is_idle, seconds=10)


def test_streams_together_are_the_tokens_of_each_alone(served: Served) -> None:
    many = prompts(24)
    calls = [served.stub.GenerateStream(ask(ids)) for ids in many]
    together = [[i for message in call for i in message.token_ids] for call in calls]
    alone = [list(served.stub.Generate(ask(ids)).outputs[0].token_ids) for ids in many[:6]]
    assert together[:6] == alone and all(len(tokens) == 20 for tokens in together)
    check_idle(served)


def test_calls_that_end_early_give_their_pages_back(served: Served) -> None:
    calls = [served.stub.GenerateStream(ask(ids, max_tokens=400, n=2)) for ids in prompts(12)]
    for call in calls:
        call.initial_metadata()
    for number, call in enumerate(calls):
        if number % 3 == 0:
            next(call)
        call.cancel()
    check_idle(served)


def test_a_deadline_ends_the_request_inside_the_engine(served: Served) -> None:
    call = served.stub.Generate.future(ask([5, 6, 7], max_tokens=500), timeout=0.05)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    check_idle(served)


def test_chat_text_stops_and_logprobs_come_through(served: Served) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="the quick brown fox")])
    params = pb.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    request = pb.GenerateRequest(chat=chat, params=params)
    whole = served.stub.Generate(request).outputs[0]
    assert len(whole.logprobs) == 30 and len(whole.prompt_logprobs) == whole.finish.prompt_tokens
    assert served.stub.Detokenize(pb.DetokenizeRequest(token_ids=whole.token_ids)).text == whole.text
    stop = whole.text[len(whole.text) // 2 :][:3]
    request.params.stop.append(stop)
    cut = served.stub.Generate(request).outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish.stop_string == stop


@pytest.mark.parametrize(
    ("request_", "field"),
    [(ask([1] * 600), "token_ids"), (ask([600]), "prompt"), (ask([1], stop_token_ids=[600]), "stop_token_ids")],
)
def test_limits_of_the_real_engine_are_refused_by_name(
    served: Served, request_: pb.GenerateRequest, field: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        served.stub.Generate(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["jaxserve-field"] == field


def test_a_batch_file_runs_through_the_real_engine(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    from batch_generate import main

    def load(_: EngineConfig) -> Engine:
        engine.start()
        return engine

    source, target = tmp_path / "in", tmp_path / "out"
    body = {"prompt": "the quick brown", "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True, "n": 2}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | {"seed": i}} for i in range(30)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert main([str(source), str(target), "--accelerator", "cpu"], load) == 0
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {str(i) for i in range(30)}
    texts = {choice["text"] for answer in answers for choice in answer["response"]["body"]["choices"]}
    assert len(texts) == 1 and texts.pop().startswith("the quick brown")


@dataclass(frozen=True)
class Streamed:
    """What the reference check reads of an output."""

    token_ids: tuple[int, ...]
    logprobs: tuple[pb.TokenLogprobs, ...]


@pytest.mark.full
@pytest.mark.parametrize(("name", "model"), [("smollm2", "smollm2-135m-instruct"), ("gemma3", "gemma3-270m")])
def test_the_reference_items_stream_together_over_grpc(shared: Path, name: str, model: str) -> None:
    """Texts and chats as a client sends them: the ids they become, and the tokens that come back."""
    path = shared / "reference" / f"{name}.json"
    items, raws = load_items(path), json.loads(path.read_text())["items"]
    lean = {"dtype": "float32", "slots": 16, "max_len": 1024, "accelerator": "cpu", "batch_invariant": True}
    engine = load_engine(EngineConfig(model=model, **lean))
    with serving(engine) as served:
        has_template = served.stub.ModelInfo(pb.ModelInfoRequest()).has_chat_template
        requests = [prompt_of(raw, has_template) for raw in raws]
        for request, item in zip(requests, items, strict=True):
            if request.WhichOneof("prompt") != "token_ids":
                assert tuple(served.stub.Tokenize(tokenize_of(request)).token_ids) == item.prompt_ids
        calls = [served.stub.GenerateStream(request) for request in requests]
        assert_matches(items, [streamed(list(call)) for call in calls])  # pyright: ignore[reportArgumentType]


def prompt_of(raw: dict, has_template: bool) -> pb.GenerateRequest:
    """As text or chat; as ids where the checkpoint brings no chat template."""
    params = pb.SamplingParams(temperature=0, max_tokens=PARAMS.max_tokens, ignore_eos=True, logprobs=PARAMS.logprobs)
    if "messages" in raw and not has_template:
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=raw["prompt_ids"]), params=params)
    if "messages" in raw:
        return pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(**m) for m in raw["messages"]]), params=params)
    return pb.GenerateRequest(text=raw["prompt"], params=params)


def tokenize_of(request: pb.GenerateRequest) -> pb.TokenizeRequest:
    if request.HasField("chat"):
        return pb.TokenizeRequest(chat=request.chat)
    return pb.TokenizeRequest(text=request.text)


def streamed(messages: list[pb.Output]) -> Streamed:
    ids = tuple(i for message in messages for i in message.token_ids)
    return Streamed(ids, tuple(entry for message in messages for entry in message.logprobs))
