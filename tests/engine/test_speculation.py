"""Drafts change no token: greedy or sampled, any source, any number of them, with stops, penalties and preemption.
float32, tiny random model."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import jaxserve.start
from jaxserve import LLM, SamplingParams
from jaxserve.device.speculate import FirstLayers
from tests.engine.conftest import Engines
from tests.engine.test_exactness import GREEDY, LENGTHS, assert_same, one_by_one, prompts
from tests.engine.test_service_promises import check_idle, random_params, run_trace

DRAFTS = {
    "ngram": {"draft": "ngram", "speculate_tokens": 4},
    "first layer": {"draft": "self:layers=1", "speculate_tokens": 4},
    "ngram, auto": {"draft": "ngram"},
    "first layer, auto": {"draft": "self:layers=1"},
}
MORE_DRAFTS = {
    "8 bits": {"draft": "self:int8", "speculate_tokens": 3},
    "4 bits, two devices": {"draft": "self:int4", "speculate_tokens": 2, "tensor_parallel": 2},
    "ngram, K=1": {"draft": "ngram", "speculate_tokens": 1},
    "ngram, K=9": {"draft": "ngram", "speculate_tokens": 9},
    "first layer, two devices": {"draft": "self:layers=1", "tensor_parallel": 2},
    "first layer, K=2, batch invariant": {"draft": "self:layers=1", "speculate_tokens": 2, "batch_invariant": True},
}
EVERY_DRAFT = [
    *(pytest.param(options, id=name) for name, options in DRAFTS.items()),
    *(pytest.param(options, id=name, marks=pytest.mark.full) for name, options in MORE_DRAFTS.items()),
]


def repetitive(lengths=LENGTHS) -> list[list[int]]:
    """Prompts in which a few short phrases come again and again: what prompt lookup is for."""
    rng = np.random.default_rng(7)
    made = []
    for length in lengths:
        phrases = [rng.integers(3, 400, 5).tolist() for _ in range(2)]
        made.append([token for _ in range(length) for token in phrases[rng.integers(2)]][:length])
    return made


@pytest.fixture(scope="module")
def plain(engines: Engines) -> LLM:
    return engines(prefix_reuse=False)


@pytest.mark.parametrize("draft", EVERY_DRAFT)
def test_speculative_greedy_equals_greedy(engines: Engines, plain: LLM, draft: dict) -> None:
    llm, many = engines(**draft), prompts(LENGTHS) + repetitive()
    params = replace(GREEDY, max_tokens=48)
    wanted = one_by_one(plain, many, params)
    got = llm.generate(many, params)
    assert_same(got, wanted)
    drafted = sum(output.usage.drafted_tokens for output in got)
    accepted = sum(output.usage.accepted_tokens for output in got)
    is_auto = "speculate_tokens" not in draft  # which may find, on a model this small, that no drafts gain
    assert is_auto or 0 < accepted < drafted, "drafts were never, or always, accepted: this proves little"
    load = llm.engine.load()
    assert load.draft_tokens >= drafted and load.accepted_tokens >= accepted
    check_idle(llm)


@pytest.mark.parametrize("draft", EVERY_DRAFT)
def test_a_seeded_request_draws_the_same_with_every_draft(engines: Engines, plain: LLM, draft: dict) -> None:
    """All rules at once, in one batch: what a draft sees of penalties and counts is what plain sampling would see."""
    rng = random.Random(5)
    many = prompts([rng.randrange(1, 120) for _ in range(20)], seed=3) + repetitive([40] * 20)
    params = [replace(random_params(rng), seed=number, n=1, prompt_logprobs=None) for number in range(len(many))]
    wanted, got = plain.generate(many, params), engines(**draft).generate(many, params)
    for a, b in zip(got, wanted, strict=True):
        assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
            b.token_ids, b.text, b.finish_reason, b.stop_reason,
        )  # fmt: skip
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None:
            np.testing.assert_allclose(
                [entry.logprob for entry in a.logprobs], [entry.logprob for entry in b.logprobs], rtol=0, atol=1e-4
            )


def test_a_preempted_speculating_request_resumes_with_the_same_tokens(engines: Engines, plain: LLM) -> None:
    llm, many = engines(draft="self:layers=1", speculate_tokens=4, pool="304", max_len=300), repetitive()
    params = replace(GREEDY, max_tokens=70)
    before = llm.engine.load().preemptions
    got = llm.generate(many, params)
    assert llm.engine.load().preemptions > before, "the pool was not small enough to prove anything"
    assert_same(got, one_by_one(plain, many, params))
    check_idle(llm)


def test_a_request_may_opt_out(engines: Engines, plain: LLM) -> None:
    llm, many = engines(draft="self:layers=1", speculate_tokens=4), repetitive([60, 60])
    params = [GREEDY, replace(GREEDY, speculate=False)]
    with_drafts, without = llm.generate(many, params)
    assert with_drafts.usage.drafted_tokens > 0
    assert without.usage.drafted_tokens == without.usage.accepted_tokens == 0
    assert_same([with_drafts, without], one_by_one(plain, many))


def test_a_draft_never_runs_past_a_length_limit(engines: Engines) -> None:
    llm = engines(draft="self:layers=1", speculate_tokens=4)
    max_len = llm.engine.info.max_len
    for max_tokens in (1, 2, 3, 4, 5, 6):
        output = llm.generate(repetitive([50]), replace(GREEDY, max_tokens=max_tokens))[0]
        assert len(output.token_ids) == max_tokens and output.finish_reason == "length"
    output = llm.generate(repetitive([max_len - 7]), replace(GREEDY, max_tokens=None))[0]
    assert len(output.token_ids) == 7
    check_idle(llm)


def test_the_target_as_its_own_draft_is_always_right(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, with penalties: draft and target see the same counts and the same noise."""
    monkeypatch.setattr(jaxserve.start, "make_draft", lambda name, model, load: FirstLayers(model))
    llm = engines(draft="self:layers=1", speculate_tokens=3, page_size=32)
    sampled = SamplingParams(
        temperature=0.8, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.2, max_tokens=60, ignore_eos=True
    )
    got = llm.generate(prompts([5, 20, 40, 64]), [GREEDY, replace(GREEDY, max_tokens=70), sampled, sampled])
    for output in got:
        assert output.usage.drafted_tokens > 0
        # Of the last step's drafts, those past the end of the answer are not counted.
        assert output.usage.drafted_tokens - output.usage.accepted_tokens <= 3


def test_nothing_compiles_and_everything_ends_once_while_speculating(engines: Engines) -> None:
    # An engine of its own: compiles are counted for the whole process, and the others' starts would count.
    run_trace(engines(draft="ngram", queue_limit=512), 60, "speculating")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft": "lookup"}, "none, ngram, self:int8, self:int4, self:layers=N, model:REF"),
        ({"draft": "ngram:3"}, "takes no detail"),
        ({"draft": "self:layers=9"}, "the model has 2 layers"),
        ({"draft": "ngram", "speculate_tokens": 16}, "auto or a number from 0 to 15"),
        ({"draft": "ngram", "speculate_tokens": "many"}, "auto or a number from 0 to 15"),
        ({"speculate_tokens": 9}, "needs a draft"),
    ],
)
def test_a_wrong_draft_is_refused_with_the_choices(engines: Engines, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engines(**options)
