"""Constrained rows in the engine: valid answers, mates unharmed, drafts and preemption change no token.  Tiny random
model, float32."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import replace

import jsonschema_rs
import numpy as np
import pytest

from jaxserve import LLM, RequestError, SamplingParams, StructuredOutputs, batch
from jaxserve.request import ErrorCode, FinishReason, Request
from jaxserve.sched.plan import Call, Row
from tests.engine.conftest import Engines
from tests.engine.test_exactness import prompts
from tests.engine.test_service_promises import check_idle

SCHEMAS = [
    {
        "type": "object",
        "properties": {
            f"k{number}": {"type": "integer", "minimum": number, "maximum": number + 50},
            "tag": {"enum": [f"t{number}", f"u{number}"]},
            "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1 + number % 3},
            "text": {"type": "string", "maxLength": 3 + number % 5},
        },
        "required": [f"k{number}", "tag", *(["list"] if number % 2 else []), *(["text"] if number % 3 else [])],
        "additionalProperties": False,
    }
    for number in range(32)
]
# A random model writes blanks and strings as long as it may; what is tested is that the answer is valid.
SEEDED = SamplingParams(temperature=1.0, max_tokens=400, seed=3)
MANY = {"slots": 32, "pool": "16384"}
SPECS = [
    *(StructuredOutputs(json=schema) for schema in SCHEMAS[:4]),
    StructuredOutputs(regex="([a-f]{2}-)+[0-9]{1,3}"),
    StructuredOutputs(choice=["yes", "no", "müßig 🫠"]),
    StructuredOutputs(grammar='start: item ("," item){1,6}\nitem: /[a-z]{1,4}/'),
]


def constrained(spec: StructuredOutputs, **fields) -> SamplingParams:
    return replace(SEEDED, structured_outputs=spec, **fields)


@pytest.fixture(scope="module")
def many(engines: Engines) -> LLM:
    return engines(**MANY)


@pytest.fixture(scope="module")
def speculating(engines: Engines) -> LLM:
    return engines(draft="ngram", speculate_tokens=4, **MANY)


def test_nothing_compiles_after_the_start(speculating: LLM) -> None:
    """First of all: compiles are counted for the whole process, and another engine's start would count."""
    params = [constrained(SPECS[number % len(SPECS)], max_tokens=30) for number in range(20)]
    for count in (1, 2, 5, 20):
        speculating.generate(prompts([30] * count), params[:count])
        speculating.generate(prompts([30] * count), [replace(SEEDED, max_tokens=8)] * (count - 1) + params[:1])
    assert speculating.engine.load().compiles == 0


@pytest.mark.parametrize("name", ["speculating", "many"])
def test_32_concurrent_requests_with_32_schemas_are_all_valid(name: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(name)
    params = [constrained(StructuredOutputs(json=schema), seed=number) for number, schema in enumerate(SCHEMAS)]
    outputs = llm.generate(prompts([20] * 32), params)
    for schema, output in zip(SCHEMAS, outputs, strict=True):
        assert (output.finish_reason, output.stop_reason) == ("stop", None), output.text
        assert jsonschema_rs.is_valid(schema, json.loads(output.text)), output.text
    check_idle(llm)


@pytest.mark.parametrize("name", ["many", "speculating"])
def test_16_plain_rows_beside_16_constrained_ones_draw_what_they_draw_alone(
    many: LLM, name: str, request: pytest.FixtureRequest
) -> None:
    plain = [replace(SEEDED, seed=number, max_tokens=40, ignore_eos=True) for number in range(16)]
    bound = [constrained(SPECS[number % len(SPECS)], seed=number) for number in range(16)]
    texts = prompts([24] * 16)
    alone = many.generate(texts, plain)
    mixed = request.getfixturevalue(name).generate(texts + texts, plain + bound)
    assert [output.token_ids for output in mixed[:16]] == [output.token_ids for output in alone]
    assert all(output.finish_reason == "stop" for output in mixed[16:])


@pytest.mark.parametrize("temperature", [0, 1])
def test_drafts_change_no_token_of_a_constrained_row(many: LLM, speculating: LLM, temperature: int) -> None:
    params = [constrained(spec, temperature=temperature, max_tokens=120) for spec in SPECS]
    params += [replace(each, bad_words=["the", "ab", "1"], logprobs=1) for each in params[4:]]
    params += [replace(SEEDED, bad_words=["the", "e", "pu"], temperature=temperature, max_tokens=60, min_tokens=60)]
    texts = [[7, 8, 9] * 8] * len(params)
    wanted, got = many.generate(texts, params), speculating.generate(texts, params)
    for a, b in zip(got, wanted, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
    assert sum(output.usage.accepted_tokens for output in got) > 0, "no draft was accepted: this proves little"


def test_a_preempted_constrained_row_resumes_with_the_same_tokens(many: LLM, engines: Engines) -> None:
    llm = engines(draft="self:layers=1", speculate_tokens=4, pool="304", max_len=300)
    params = [
        constrained(SPECS[number % len(SPECS)], seed=number, max_tokens=90, ignore_eos=True) for number in range(10)
    ]
    texts = prompts([100] * 10)
    before = llm.engine.load().preemptions
    got = llm.generate(texts, params)
    assert llm.engine.load().preemptions > before, "the pool was not small enough to prove anything"
    assert [output.token_ids for output in got] == [output.token_ids for output in many.generate(texts, params)]
    check_idle(llm)


def test_a_stale_mask_never_reaches_the_slots_next_owner(engines: Engines) -> None:
    """One slot after the other: aborted in the middle of a grammar, then a plain row, then another grammar."""
    llm = engines(draft="self:layers=1", speculate_tokens=4, pool="304", max_len=300)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    wanted = llm.generate([[5, 6, 7]] * 4, plain)
    endless = constrained(StructuredOutputs(regex="[0-9]+"), ignore_eos=True, max_tokens=200)
    for turn in range(3):
        handles = [
            llm.engine.submit(Request(id=f"stale-{turn}-{i}", prompt_ids=(5, 6, 7), params=endless)) for i in range(4)
        ]
        for handle in handles:
            next(iter(handle))
            handle.abort()
        got = llm.generate([[5, 6, 7]] * 4, [plain, plain, constrained(StructuredOutputs(choice=["b"])), plain])
        assert [output.token_ids for output in (got[0], got[1], got[3])] == [wanted[0].token_ids] * 3
        assert got[2].text == "b"
        for handle in handles:
            assert list(handle)[-1].finish_reason is FinishReason.ABORT
    check_idle(llm)
    deadline = time.monotonic() + 10  # the last step of what was aborted is read after the abort
    while llm.engine._loop._masks._masks:
        assert time.monotonic() < deadline, "masks of sequences that have ended are kept"
        time.sleep(0.005)


def test_a_constrained_row_ends_when_its_grammar_is_complete(many: LLM) -> None:
    spec = StructuredOutputs(regex="(ab){1,4}")
    for fields in ({"ignore_eos": True}, {"min_tokens": 300}):
        output = many.generate([[5, 6, 7]], constrained(spec, **fields))[0]
        assert (output.text, output.finish_reason) == ("abababab", "stop")
    assert re.fullmatch("(ab){1,4}", many.generate([[5, 6, 7]], constrained(spec))[0].text)


def test_stop_strings_and_samples_work_within_a_grammar(many: LLM) -> None:
    spec = StructuredOutputs(regex="(ab|cd)+x")
    output = many.generate([[5, 6, 7]], constrained(spec, stop=["x"], n=4))[0]
    assert all(re.fullmatch("(ab|cd)+", sample.text) and sample.stop_reason == "x" for sample in output.samples)
    assert len({sample.text for sample in output.samples}) > 1


def test_the_tokens_of_a_bad_word_never_follow_each_other(many: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = many.generate([[5, 6, 7]], params)[0].token_ids
    pairs = [plain[at : at + 2] for at in range(len(plain) - 1)]
    encode, decode = many.tokenizer.encode, many.tokenizer.decode
    pair = next(pair for pair in pairs if tuple(encode(decode(pair))) == pair and not decode(pair).startswith(" "))
    got = many.generate([[5, 6, 7]], replace(params, bad_words=[decode(pair)]))[0].token_ids
    assert pair not in [got[at : at + 2] for at in range(len(got) - 1)]
    at = pairs.index(pair)
    assert got[: at + 1] == plain[: at + 1], "more was forbidden than the word's last token"


def test_rules_that_leave_nothing_end_that_row_alone(many: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    wanted = many.generate([[5, 6, 7]], plain)[0].token_ids
    dead = constrained(StructuredOutputs(choice=["b"]), bad_words=["b"])
    handle = many.engine.submit(Request(id="dead", prompt_ids=(5, 6, 7), params=dead))
    assert many.generate([[5, 6, 7]], plain)[0].token_ids == wanted
    last = list(handle)[-1]
    assert (last.finish_reason, last.error_code) == (FinishReason.ERROR, ErrorCode.INVALID_ARGUMENT)
    assert "no token is left" in (last.error or "")
    check_idle(many)


def test_a_harmful_grammar_harms_no_neighbour(many: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    handle = many.engine.submit(Request(id="neighbour", prompt_ids=(5, 6, 7), params=params))
    began = time.monotonic()
    for spec in (
        StructuredOutputs(json={"type": "integer", "multipleOf": 999983}),
        StructuredOutputs(grammar="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3500)) + 'r3500: "a"\n'),
        StructuredOutputs(regex="(((a{1000}){1000}){1000})"),
        StructuredOutputs(regex="("),
    ):
        with pytest.raises(RequestError, match="cannot be used"):
            many.generate([[5, 6, 7]], constrained(spec))
    assert time.monotonic() - began < 15
    assert sum(len(chunk.token_ids) for chunk in handle) == 300


def test_a_submit_inside_an_event_loop_gets_its_mask_from_prepare(many: LLM) -> None:
    request = Request(id="prepared", prompt_ids=(5, 6, 7), params=constrained(StructuredOutputs(choice=["yes"])))
    prepared = many.engine.prepare(request)
    assert prepared.make_mask is not None

    async def ask() -> str:
        return "".join([chunk.text or "" async for chunk in many.engine.submit(prepared)])

    assert asyncio.run(ask()) == "yes"


@pytest.mark.full
@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_the_packaged_model_writes_valid_json(draft: str) -> None:
    with LLM(slots=16, max_len=1024, draft=draft, accelerator="cpu") as llm:
        params = [constrained(StructuredOutputs(json=schema), max_tokens=300) for schema in SCHEMAS[:16]]
        texts = [f"A JSON object with the fields {list(schema['properties'])}:\n" for schema in SCHEMAS[:16]]
        for schema, output in zip(SCHEMAS, llm.generate(texts, params), strict=False):
            assert output.finish_reason == "stop"
            assert jsonschema_rs.is_valid(schema, json.loads(output.text)), output.text


def test_masks_are_made_for_the_drafts_that_are_verified_and_no_others() -> None:
    """A lookup may find more than the program chosen after it takes, or fewer; a row may have room for fewer still."""
    rows = tuple(
        Row(sequence=10 + i, epoch=0, slot=i, start=-1, q_len=q_len, pages=(1,), masked=i < 3)
        for i, q_len in enumerate((8, 8, 2, 8))
    )
    tokens, count = np.arange(28).reshape(4, 7), np.array([7, 1, 7, 7])
    found = batch.read_drafts(Call(rows, 4, 1 + 3), tokens, count)
    assert found == {10: [0, 1, 2], 11: [7], 12: [14]}
