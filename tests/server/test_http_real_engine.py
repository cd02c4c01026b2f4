"""HTTP around the real engine: the tokens that gRPC gives, every page back however a call ends, and whatever its own
OpenAPI document lets a client think of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from jaxserve.engine import Engine
from server.args import ServerConfig
from server.pb.jaxserve.v1 import generation_pb2 as pb
from tests.server.http_client import opened, post, send
from tests.server.real import tiny_engine, until_all_pages_are_back
from tests.server.serving import Served, serving

CONFIG = ServerConfig(http_port=0, max_message_mb=1, max_prompt_mb=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    with serving(engine, CONFIG) as served:
        yield served


@pytest.fixture(autouse=True)
def pages_come_back(engine: Engine) -> Iterator[None]:
    yield
    until_all_pages_are_back(engine)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(3, 400, length).tolist() for length in rng.integers(1, 80, count)]


def test_a_list_of_prompts_has_the_tokens_that_grpc_gives_each_alone(served: Served) -> None:
    many = prompts(6)
    body = {"prompt": many, "max_tokens": 12, "seed": 3, "n": 2, "ignore_eos": True, "return_token_ids": True}
    choices = post(served.http, "/v1/completions", **body).json["choices"]
    streamed: list[list[int]] = [[] for _ in choices]
    for event in post(served.http, "/v1/completions", **body, stream=True).events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["token_ids"]
    params = pb.SamplingParams(max_tokens=12, seed=3, n=2, ignore_eos=True)
    alone = [
        list(output.token_ids)
        for ids in many
        for output in served.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), params=params)).outputs
    ]
    assert [choice["token_ids"] for choice in choices] == streamed == alone


def test_an_echo_with_logprobs_scores_a_text_as_generating_it_did(served: Served) -> None:
    """What evaluation harnesses live on; vocabulary and order are the engine's, so equal to the last digit."""
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": client.models.list().data[0].id, "logprobs": 1, "temperature": 0}
        extra = {"return_token_ids": True, "ignore_eos": True, "allowed_token_ids": list(range(3, 400))}
        made = client.completions.create(prompt=prompts(1)[0], max_tokens=8, extra_body=extra, **asked).choices[0]
        assert made.model_extra is not None and made.logprobs is not None
        whole = [*made.model_extra["prompt_token_ids"], *made.model_extra["token_ids"]]
        scored = client.completions.create(prompt=whole, echo=True, max_tokens=0, **asked).choices[0].logprobs
        assert scored is not None and scored.token_logprobs is not None
        assert len(scored.token_logprobs) == len(whole) and scored.token_logprobs[0] is None
        assert scored.token_logprobs[-8:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-5)


def test_clients_that_go_away_give_their_pages_back(served: Served, engine: Engine) -> None:
    for number, ids in enumerate(prompts(9)):
        body = {"prompt": [ids, ids[::-1]], "max_tokens": 40, "ignore_eos": True, "n": 2, "stream": number % 2 == 0}
        with opened(served.http, "/v1/completions", body) as connection:
            if number % 3 == 0 and body["stream"]:
                connection.recv(1000)


# -- fuzz --------------------------------------------------------------------------------------------------------------

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def fuzz(served: Served, cases: int) -> None:
    """cases: of all operations together, valid by the document and not, in turn."""
    schema = schemathesis.openapi.from_dict(send(served.http, "GET", "/openapi.json").json)
    schema.config.base_url = served.http
    operations = [result.ok() for result in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    made: Counter[str] = Counter()
    statuses: dict[str, set[int]] = {operation.path: set() for operation in posts}
    for operation in operations:
        share = cases // (2 * len(posts)) if operation.method == "post" else 2
        for mode in GenerationMode:
            if operation.method == "post" or mode is GenerationMode.POSITIVE:

                @settings(max_examples=share, suppress_health_check=SLOW, database=None)
                @given(case=operation.as_strategy(generation_mode=mode))
                def run(case: Case) -> None:
                    reply = case.call_and_validate(base_url=served.http, checks=CHECKS, timeout=30)
                    statuses.setdefault(case.operation.path, set()).add(reply.status_code)
                    made[case.operation.method] += 1

                run()
    assert made["post"] >= cases // (2 * len(posts)) * 2 * len(posts), made
    assert all({200, 400} <= statuses[operation.path] for operation in posts), statuses  # it reached what it fuzzes


def test_nothing_that_the_openapi_document_can_think_of_is_our_fault(served: Served) -> None:
    fuzz(served, 100)


@pytest.mark.full
def test_a_thousand_such_calls(served: Served) -> None:
    fuzz(served, 1000)
