"""Greedy output is the same token for token, whatever the batch mates, chunks, pages, prefix hits, preemption or order;
a seeded request depends on (seed, position) and nothing else.  float32, tiny random model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from tests.engine.conftest import Engines

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
TIE = 1e-3  # a difference counts unless the plain run's top two were closer than this


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 400, length).tolist() for length in lengths]


LENGTHS = (1, 15, 16, 17, 31, 33, 64, 65, 130, 200)  # around page and chunk borders


def one_by_one(llm: LLM, many: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = GREEDY):
    each = params if isinstance(params, Sequence) else [params] * len(many)
    return [llm.generate([prompt], one)[0] for prompt, one in zip(many, each, strict=True)]


def assert_same(got, want) -> None:
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        differs = [i for i, pair in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if pair[0] != pair[1]]
        if differs:
            best, second = (value for _, value in b.logprobs[differs[0]].top[:2])
            assert best - second < TIE, f"request {number} differs at token {differs[0]}, gap {best - second}"


@pytest.fixture(scope="module")
def plain(engines: Engines):
    """The plain run: each request alone, no prefix table, whole prompts."""
    llm = engines(prefix_reuse=False, prefill_chunk=256, prefill_tokens=256)
    return one_by_one(llm, prompts(LENGTHS))


def test_batch_matches_single(llm: LLM, plain) -> None:
    assert_same(llm.generate(prompts(LENGTHS), GREEDY), plain)


def test_the_portable_backends_give_the_same_tokens(engines: Engines, plain) -> None:
    """Where `auto` takes the native kernels, as here if they are installed: XLA's own products and attention."""
    llm = engines(matmul_backend="xla", attention_backend="xla")
    assert_same(llm.generate(prompts(LENGTHS), GREEDY), plain)


def test_row_order_changes_no_token(llm: LLM, plain) -> None:
    got = llm.generate(prompts(LENGTHS)[::-1], GREEDY)
    assert_same(got[::-1], plain)


@pytest.mark.parametrize(("chunk", "page"), [(16, 16), (32, 64)])
def test_chunked_prefill_equals_whole(engines: Engines, plain, chunk: int, page: int) -> None:
    llm = engines(prefill_chunk=chunk, prefill_tokens=64, page_size=page)
    assert_same(llm.generate(prompts(LENGTHS), GREEDY), plain)


def test_prefix_hit_changes_no_token(llm: LLM, plain) -> None:
    first = llm.generate(prompts(LENGTHS), GREEDY)
    again = llm.generate(prompts(LENGTHS), GREEDY)
    assert all(output.usage.cached_tokens >= 16 for output in again if len(output.prompt_ids) > 16)
    assert_same(first, plain)
    assert_same(again, plain)


def test_preempted_request_resumes_with_same_tokens(engines: Engines, plain) -> None:
    """A pool that holds one and a half of the longest sequences: requests push each other out and come back."""
    llm = engines(pool="304", max_len=300)
    before = llm.engine.load().preemptions
    got = llm.generate(prompts(LENGTHS), GREEDY)
    assert llm.engine.load().preemptions > before, "the pool was not small enough to prove anything"
    assert_same(got, plain)


def test_batch_invariant_excuses_no_tie(engines: Engines) -> None:
    """One shape for decode and one for prefill: the very bits of the logprobs are those of the request alone."""
    llm = engines(batch_invariant=True)
    many = prompts(LENGTHS)
    alone = one_by_one(llm, many)
    together = llm.generate(many, GREEDY)
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids == b.token_ids
        assert [entry.logprob for entry in a.logprobs] == [entry.logprob for entry in b.logprobs]


@pytest.mark.parametrize(("kv_dtype", "near_by"), [("int8", 0.05), ("float8_e4m3fn", 0.4)])  # e4m3 has 8 x the step
def test_an_8_bit_pool_keeps_the_promises_and_stays_near(
    engines: Engines, plain, kv_dtype: str, near_by: float
) -> None:
    """The same bits alone, in a batch and after prefix hits; the first token's logprobs near those of a float32 pool."""
    llm = engines(kv_dtype=kv_dtype, page_size=32, batch_invariant=True)
    many = prompts(LENGTHS)
    alone = one_by_one(llm, many)
    together = llm.generate(many, GREEDY)
    for a, b, exact in zip(alone, together, plain, strict=True):
        assert a.token_ids == b.token_ids
        assert [entry.logprob for entry in a.logprobs] == [entry.logprob for entry in b.logprobs]
        near, wanted = (dict(output.logprobs[0].top) for output in (a, exact))
        assert all(abs(near[token] - wanted[token]) < near_by for token in near.keys() & wanted.keys())
        assert near != wanted, "the pool was not in 8 bits"


def test_seeded_request_depends_on_nothing_else(llm: LLM, engines: Engines) -> None:
    """Alone, among unseeded mates, in small chunks, preempted: the same tokens."""
    sampled = SamplingParams(
        temperature=1.0, top_p=0.9, top_k=50, max_tokens=24, ignore_eos=True, seed=1234, logprobs=2
    )
    many = prompts(LENGTHS)
    each = [replace(sampled, seed=index) for index in range(len(many))]
    alone = [output.token_ids for output in one_by_one(llm, many, each)]
    mates = [replace(sampled, seed=None)] * len(many)
    for other in (llm, engines(prefill_chunk=16, prefill_tokens=64), engines(pool="304", max_len=300)):
        got = other.generate(many + many, each + mates)[: len(many)]
        assert [output.token_ids for output in got] == alone


def test_unseeded_requests_differ_and_tell_their_seed(llm: LLM) -> None:
    sampled = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = llm.generate([[5, 6, 7]] * 2, sampled)
    assert first.token_ids != second.token_ids
    assert first.seed != second.seed
    again = llm.generate([[5, 6, 7]], replace(sampled, seed=first.seed))[0]
    assert again.token_ids == first.token_ids


def test_samples_of_one_request_differ_and_share_its_prompt(llm: LLM) -> None:
    prompt = prompts([100], seed=5)[0]
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=3, seed=9)
    output = llm.generate([prompt], params)[0]
    assert len({sample.token_ids for sample in output.samples}) == 3
    assert sum(sample.usage.cached_tokens for sample in output.samples) >= 2 * 80
    alone = llm.generate([prompt], replace(params, n=1))[0]
    assert alone.token_ids == output.samples[0].token_ids


def test_flat_logits_repeat_no_id(llm: LLM) -> None:
    """Noise depends on the token id: on (nearly) flat logits 50 draws are 50 ids."""
    params = SamplingParams(temperature=100.0, max_tokens=50, ignore_eos=True, seed=3)
    token_ids = llm.generate([[9, 9, 9]], params)[0].token_ids
    assert len(set(token_ids)) > 40  # 50 draws from 512 ids: 2.4 repeats are expected, 10 are one in 10^4
