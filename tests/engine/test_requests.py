"""What one request may ask for has its effect, or is refused by name."""

from __future__ import annotations

import math

import pytest

from jaxserve import LLM, RequestError, SamplingParams
from jaxserve.request import ErrorCode, Request
from tests.engine.conftest import Engines

PROMPT = [11, 42, 7, 300, 55]


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 16, "ignore_eos": True} | fields))


def tokens(llm: LLM, **fields) -> tuple[int, ...]:
    return llm.generate([PROMPT], greedy(**fields))[0].token_ids


def test_max_tokens_and_length(llm: LLM) -> None:
    output = llm.generate([PROMPT], greedy(max_tokens=5))[0]
    assert len(output.token_ids) == 5
    assert output.finish_reason == "length"
    assert output.usage.prompt_tokens == len(PROMPT)
    assert output.usage.completion_tokens == 5


def test_max_tokens_zero_scores_the_prompt(llm: LLM) -> None:
    output = llm.generate([PROMPT], greedy(max_tokens=0, prompt_logprobs=1))[0]
    assert output.token_ids == ()
    assert output.finish_reason == "length"
    assert len(output.prompt_logprobs) == len(PROMPT)


def test_context_ends_a_request(engines: Engines) -> None:
    llm = engines(max_len=64)
    output = llm.generate([PROMPT], greedy(max_tokens=None))[0]
    assert len(PROMPT) + len(output.token_ids) == 64
    assert output.finish_reason == "length"


def test_stop_id_ends_and_is_counted(llm: LLM) -> None:
    plain = tokens(llm)
    stop = plain[6]
    at = plain.index(stop)
    output = llm.generate([PROMPT], greedy(stop_token_ids=[stop]))[0]
    assert output.token_ids == plain[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == llm.tokenizer.decode(plain[:at])
    included = llm.generate([PROMPT], greedy(stop_token_ids=[stop], include_stop_str_in_output=True))[0]
    assert included.text == llm.tokenizer.decode(plain[: at + 1])


def test_stop_string_is_cut_from_the_text(llm: LLM) -> None:
    plain = llm.generate([PROMPT], greedy(max_tokens=40))[0]
    stop = plain.text[20:23]
    at = plain.text.index(stop)
    output = llm.generate([PROMPT], greedy(max_tokens=40, stop=[stop, "never to be seen"]))[0]
    assert output.text == plain.text[:at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert plain.token_ids[: len(output.token_ids)] == output.token_ids
    assert output.usage.completion_tokens == len(output.token_ids) < 40
    included = llm.generate([PROMPT], greedy(max_tokens=40, stop=stop, include_stop_str_in_output=True))[0]
    assert included.text == plain.text[: at + len(stop)]


def test_stop_before_min_tokens_does_not_end(llm: LLM) -> None:
    plain = llm.generate([PROMPT], greedy(max_tokens=40))[0]
    stop = plain.text[5:7]
    output = llm.generate([PROMPT], greedy(max_tokens=40, stop=[stop], min_tokens=30))[0]
    assert len(output.token_ids) >= 30
    banned_until = llm.generate([PROMPT], greedy(stop_token_ids=[plain.token_ids[2]], min_tokens=10))[0]
    assert len(banned_until.token_ids) >= 10
    assert plain.token_ids[2] not in banned_until.token_ids[:10]


def test_held_back_tail_is_flushed_at_length(llm: LLM) -> None:
    plain = llm.generate([PROMPT], greedy(max_tokens=12))[0]
    stop = plain.text[-2:] + "\x00 not there"
    output = llm.generate([PROMPT], greedy(max_tokens=12, stop=[stop]))[0]
    assert output.text == plain.text
    assert output.finish_reason == "length"


def test_biases_bans_and_allowed_ids(llm: LLM) -> None:
    plain = tokens(llm)
    assert set(tokens(llm, logit_bias={17: 100.0})) == {17}
    assert plain[0] not in tokens(llm, banned_token_ids=[plain[0]])
    assert set(tokens(llm, allowed_token_ids=[5, 6, 7])) <= {5, 6, 7}


def test_penalties_have_their_effect(llm: LLM) -> None:
    two = {"allowed_token_ids": [17, 18], "logit_bias": {17: 10.0}}
    assert set(tokens(llm, **two)) == {17}
    assert set(tokens(llm, **two, frequency_penalty=2.0)) == {17, 18}  # 16 tokens outgrow a bias of 10
    assert set(tokens(llm, **two, presence_penalty=2.0)) == {17}
    assert set(tokens(llm, repetition_penalty=50.0)).isdisjoint(PROMPT)  # of the prompt too


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    """Shifted by one: fed back as a prompt, the output's logprobs are the prompt's."""
    output = llm.generate([PROMPT], greedy(logprobs=5, temperature=1.0, seed=1, top_k=3, presence_penalty=1.0))[0]
    assert len(output.logprobs) == 16
    for entry, token_id in zip(output.logprobs, output.token_ids, strict=True):
        assert entry.token_id == token_id
        assert len(entry.top) == 5
        assert entry.top[0][1] >= entry.logprob
        if entry.rank == 1:
            assert entry.top[0] == (token_id, entry.logprob)
    whole = [*PROMPT, *output.token_ids]
    echoed = llm.generate([whole], greedy(max_tokens=1, prompt_logprobs=5))[0].prompt_logprobs
    assert echoed[0] is None
    for entry, again in zip(output.logprobs, echoed[len(PROMPT) :], strict=True):
        assert again.token_id == entry.token_id
        assert math.isclose(again.logprob, entry.logprob, abs_tol=1e-4)


def test_logprobs_zero_is_the_chosen_tokens_alone(llm: LLM) -> None:
    output = llm.generate([PROMPT], greedy(logprobs=0))[0]
    assert all(entry.top == () and entry.logprob < 0 for entry in output.logprobs)
    assert llm.generate([PROMPT], greedy())[0].logprobs is None


def test_prompt_logprobs_survive_chunks_hits_and_a_start(engines: Engines) -> None:
    prompt = [3 + (7 * i) % 400 for i in range(150)]
    whole = engines(prefix_reuse=False, prefill_chunk=256, prefill_tokens=256)
    want = whole.generate([prompt], greedy(max_tokens=1, prompt_logprobs=2))[0].prompt_logprobs
    assert want[0] is None
    assert all(entry.token_id == prompt[i] for i, entry in enumerate(want) if i)
    llm = engines(prefill_chunk=16, prefill_tokens=64)
    llm.generate([prompt], greedy(max_tokens=1))  # the prefix is known now
    got = llm.generate([prompt], greedy(max_tokens=1, prompt_logprobs=2))[0].prompt_logprobs
    for a, b in zip(want[1:], got[1:], strict=True):
        assert math.isclose(a.logprob, b.logprob, abs_tol=1e-4)
    late = llm.generate([prompt], greedy(max_tokens=1, prompt_logprobs=2, prompt_logprobs_start=120))[0]
    assert late.usage.cached_tokens >= 96
    assert late.prompt_logprobs[:120] == (None,) * 120
    assert all(math.isclose(a.logprob, b.logprob, abs_tol=1e-4) for a, b in zip(want[120:], late.prompt_logprobs[120:]))


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ([], {}, "empty"),
        ([512], {}, "511"),
        ([-1], {}, "511"),
        ([2_000_000_000], {}, "511"),
        ([5] * 768, {}, "768"),
        ([5] * 800, {}, "800"),
        ([5], {"stop_token_ids": [600]}, "stop_token_ids"),
        ([5], {"logit_bias": {600: 1.0}}, "logit_bias"),
        ([5], {"logit_bias": dict.fromkeys(range(301), 1.0)}, "300"),
        ([5], {"stop_token_ids": list(range(100, 120))}, "max_stop_ids"),
        ([5], {"allowed_token_ids": [4], "banned_token_ids": [4]}, "banned"),
        ([5], {"min_tokens": 800, "max_tokens": None}, "min_tokens"),
        ([5], {"prompt_logprobs": 1, "prompt_logprobs_start": 1}, "prompt_logprobs_start"),
    ],
)
def test_bad_requests_are_refused_by_name(llm: LLM, prompt, fields, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        llm.generate([[5, 6], prompt], greedy(**fields))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": -1}, "temperature"), ({"temperature": math.nan}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"), ({"n": 0}, "n"), ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"), ({"stop": ["a"], "detokenize": False}, "stop"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"seed": 2**64}, "seed"), ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": 2_000_000_000_000}, "max_tokens"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)  # fmt: skip
def test_bad_values_name_their_field(fields: dict, name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**fields)
    assert caught.value.field == name


def test_legal_corners(llm: LLM) -> None:
    plain = tokens(llm)
    assert tokens(llm, top_p=1.0, top_k=0) == plain
    assert tokens(llm, top_k=-1) == plain
    assert tokens(llm, top_k=100_000) == plain
    assert tokens(llm, temperature=1.0, top_k=1, seed=5) == plain


def test_same_id_twice_is_refused(llm: LLM) -> None:
    handle = llm.engine.submit(Request(id="twin", prompt_ids=(5, 6), params=greedy(max_tokens=200)))
    with pytest.raises(RequestError) as caught:
        llm.engine.submit(Request(id="twin", prompt_ids=(5, 6), params=greedy()))
    assert caught.value.code is ErrorCode.ALREADY_EXISTS
    handle.abort()
    assert [chunk.finish_reason.value for chunk in handle if chunk.finish_reason] == ["abort"]


def test_queue_limit_answers_resource_exhausted(engines: Engines) -> None:
    llm = engines(queue_limit=2)
    handles = [
        llm.engine.submit(Request(id=f"q{i}", prompt_ids=(5, 6), params=greedy(max_tokens=300))) for i in range(4 + 2)
    ]
    with pytest.raises(RequestError) as caught:
        llm.engine.submit(Request(id="one too many", prompt_ids=(5, 6), params=greedy()))
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    for handle in handles:
        handle.abort()
        assert sum(chunk.finish_reason is not None for chunk in handle) == 1


def test_texts_come_back_as_text(llm: LLM) -> None:
    output = llm.generate("the quick brown fox", greedy())[0]
    assert output.prompt_ids == tuple(llm.tokenizer.encode("the quick brown fox"))
    assert output.text == llm.tokenizer.decode(output.token_ids)
    chat = llm.chat([{"role": "user", "content": "hi <|im_end|>"}], greedy())[0]
    assert chat.prompt_ids.count(2) == 1  # the template's; the user's is plain text
