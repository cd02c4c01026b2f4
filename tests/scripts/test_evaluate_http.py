"""The same tasks through /v1/completions, by the harness's own client: the same scores as in process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lm_eval.models.openai_completions import LocalCompletionsAPI

from jaxserve.config import EngineConfig
from jaxserve.start import load_engine
from scripts.evaluation.model import JaxserveLM
from server.args import ServerConfig
from tests.scripts.test_evaluate import OPTIONS, TASKS, evaluate, responses
from tests.server.serving import serving
from tests.tiny_model import write_tiny_model


@contextmanager
def both(folder: Path, **options) -> Iterator[tuple[dict, dict]]:
    """The results in process and over HTTP, of one engine."""
    engine = load_engine(EngineConfig(model=str(write_tiny_model(folder / "tiny")), **(OPTIONS | options)))
    with serving(engine, ServerConfig(http_port=0)) as served:
        client = LocalCompletionsAPI(
            base_url=f"{served.http}/v1/completions", model="tiny", max_length=engine.info.max_len, max_retries=1
        )
        assert client.tokenizer_backend == "remote", "the harness found /tokenizer_info, /tokenize and /detokenize"
        try:
            yield evaluate(JaxserveLM(engine), TASKS), evaluate(client, TASKS)
        finally:
            client.tokenizer.session.close()


def scores(results: dict) -> dict:
    return {
        (task, name): value
        for task, of_task in results["results"].items()
        for name, value in of_task.items()
        if isinstance(value, float)
    }


def test_local_completions_gives_the_same_scores_to_the_last_digit(tmp_path: Path) -> None:
    """With --batch-invariant: other mates, other chunks, no prefix hits, and JSON between."""
    with both(tmp_path) as (ours, theirs):
        assert len(scores(ours)) >= 6
        assert scores(ours) == scores(theirs)
        for task in TASKS:
            assert [tuple(map(_plain, doc)) for doc in responses(ours, task)] == [
                tuple(map(_plain, doc)) for doc in responses(theirs, task)
            ]


@pytest.mark.full  # another engine to compile
def test_local_completions_gives_the_same_scores_within_the_tolerance(tmp_path: Path) -> None:
    with both(tmp_path, batch_invariant=False, prefill_chunk=32) as (ours, theirs):
        for name in ("acc,none", "acc_norm,none"):
            assert ours["results"]["river_choices"][name] == theirs["results"]["river_choices"][name]
        assert responses(ours, "tiny_greedy") == responses(theirs, "tiny_greedy")
        for task in ("river_choices", "river_perplexity"):
            for mine, other in zip(responses(ours, task), responses(theirs, task), strict=True):
                assert [_score(each) for each in mine] == pytest.approx([_score(each) for each in other], abs=1e-4)


def _plain(response: object) -> object:
    return tuple(response) if isinstance(response, list | tuple) else response


def _score(response) -> float:
    return response[0] if isinstance(response, list | tuple) else response
