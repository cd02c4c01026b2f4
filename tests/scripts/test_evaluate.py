"""The evaluation harness over the engine: its numbers are transformers', its requests wait for room, shared contexts
are computed once, and what it cannot do it says.

expected.json and greedy.jsonl: tests/data/evaluation/make_expected.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from jaxserve import LLM, SamplingParams
from jaxserve.request import RequestError
from jaxserve.text.chat import render_chat
from scripts.evaluation.generation import sampling_params
from scripts.evaluation.model import JaxserveLM
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "evaluation"
EXPECTED = json.loads((DATA / "expected.json").read_text())
TASKS = ["river_perplexity", "river_choices", "tiny_greedy"]
# A queue of two: the 28 scored choices must wait for one another.
OPTIONS = {
    "max_len": EXPECTED["context"], "slots": 4, "queue_limit": 2, "page_size": 16, "prefill_chunk": 64,
    "prefill_tokens": 64, "pool": "4096", "accelerator": "cpu", "batch_invariant": True,
}  # fmt: skip
TOLERANCE = 1e-3  # of a sum over up to 126 tokens, float32 against float64


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def lm(llm: LLM) -> JaxserveLM:
    return JaxserveLM(llm.engine)


def evaluate(lm, tasks: list[str], **options) -> dict:
    manager = TaskManager(include_path=DATA, include_defaults=False)
    results = simple_evaluate(model=lm, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options)
    assert results is not None
    return results


def responses(results: dict, task: str) -> list:
    """What the model answered, document by document."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [[response[0] for response in sample["resps"]] for sample in samples]


@pytest.fixture(scope="module")
def results(lm: JaxserveLM) -> dict:
    return evaluate(lm, TASKS)


def asked(*arguments) -> list:
    """What the harness hands a model: instances with their arguments."""
    return [SimpleNamespace(args=args, arguments=args) for args in arguments]


def test_the_tiny_tokenizer_is_the_one_of_the_expected_numbers(lm: JaxserveLM) -> None:
    assert lm.tok_encode((DATA / "river.txt").read_text(encoding="utf-8")[:80]) == EXPECTED["ids"]


def test_choices_have_transformers_log_likelihoods(results: dict) -> None:
    for ours, theirs in zip(responses(results, "river_choices"), EXPECTED["choices"], strict=True):
        for (logprob, is_greedy), (expected, expected_greedy) in zip(ours, theirs, strict=True):
            assert abs(logprob - expected) < TOLERANCE
            assert is_greedy == expected_greedy


def test_a_continuation_is_greedy_when_each_of_its_tokens_is_the_most_likely(lm: JaxserveLM) -> None:
    answers = [json.loads(line) for line in (DATA / "greedy.jsonl").read_text(encoding="utf-8").splitlines()]
    prompt, answer = answers[0]["prompt"], answers[0]["answer"]
    right, wrong = lm.loglikelihood(asked((prompt, answer), (prompt, answer + " hills")))
    assert right[1] is True and wrong[1] is False
    assert right[0] > wrong[0]


def test_accuracy_follows_from_transformers_log_likelihoods(results: dict) -> None:
    docs = [json.loads(line) for line in (DATA / "choices.jsonl").read_text().splitlines()]
    best = [max(range(4), key=lambda i, scores=scores: scores[i][0]) for scores in EXPECTED["choices"]]
    right = sum(index == doc["answer"] for index, doc in zip(best, docs, strict=True))
    assert results["results"]["river_choices"]["acc,none"] == pytest.approx(right / len(docs))


def test_a_long_text_is_scored_in_windows_every_token_once(results: dict) -> None:
    for [logprob], expected in zip(responses(results, "river_perplexity"), EXPECTED["rolling"], strict=True):
        assert expected["windows"] > 1
        assert abs(logprob - expected["logprob"]) < TOLERANCE


def test_perplexity_follows_from_transformers_log_likelihoods(results: dict) -> None:
    bits = -sum(each["logprob"] for each in EXPECTED["rolling"]) / 0.6931471805599453
    paragraphs = (DATA / "river.txt").read_text(encoding="utf-8").split("\n\n")
    num_bytes = sum(len(paragraph.strip().encode()) for paragraph in paragraphs)
    assert results["results"]["river_perplexity"]["bits_per_byte,none"] == pytest.approx(bits / num_bytes, rel=1e-6)


def test_generated_texts_are_transformers_up_to_the_stop(results: dict) -> None:
    answers = [json.loads(line)["answer"] for line in (DATA / "greedy.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [text for [text] in responses(results, "tiny_greedy")]
    assert texts[:-1] == answers[:-1]
    assert answers[-1] == texts[-1] + " not"
    assert results["results"]["tiny_greedy"]["exact_match,none"] == pytest.approx(7 / 8)


def test_a_shared_context_is_computed_once(lm: JaxserveLM, llm: LLM) -> None:
    context = "Herons and gulls and owls and geese and geese again: " * 2
    length = len(lm.tok_encode(context.rstrip()))
    assert length > 2 * 16
    hits = llm.engine.load().prefix_hit_tokens
    lm.loglikelihood(asked(*((context, choice) for choice in ("herons", "gulls", "owls", "geese"))))
    # A page is shared when all its tokens stand before the first one whose logits are wanted: the context's last.
    assert llm.engine.load().prefix_hit_tokens - hits == 3 * ((length - 1) // 16 * 16)


def test_white_space_at_a_contexts_end_goes_to_the_continuation(lm: JaxserveLM) -> None:
    (moved, _), (plain, _) = lm.loglikelihood(asked(("the quick ", "brown"), ("the quick", " brown")))
    assert moved == plain


def test_an_empty_context_is_bos(lm: JaxserveLM, llm: LLM) -> None:
    ids = llm.tokenizer.encode("the quick brown")
    [(ours, _)] = lm.loglikelihood(asked(("", "the quick brown")))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [output] = llm.generate([[llm.tokenizer.bos_id, *ids]], params)
    assert ours == sum(entry.logprob for entry in output.prompt_logprobs[1:])


def test_what_does_not_fit_is_cut_on_the_left_and_counted(lm: JaxserveLM, llm: LLM) -> None:
    context, continuation = "river" + " river" * 200, " bank"
    before = lm.num_truncated
    [(ours, _)] = lm.loglikelihood(asked((context, continuation)))
    assert lm.num_truncated == before + 1
    kept = lm.tok_encode(context + continuation)[1 - lm.max_length :]
    own = len(lm.tok_encode(context + continuation)) - len(lm.tok_encode(context))
    [output] = llm.generate([kept], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert ours == sum(entry.logprob for entry in output.prompt_logprobs[-own:])
    with pytest.raises(RequestError, match="tokens of its own"):
        lm.loglikelihood(asked(("a", context)))


def test_generation_arguments_become_sampling_params() -> None:
    kwargs = {"until": ["\n", "", "<end>"], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 5}
    params = sampling_params(kwargs, eos="</s>", special_tokens={"<end>": 3, "</s>": 2})
    assert params == SamplingParams(
        max_tokens=5, stop=["\n", "<end>", "</s>"], stop_token_ids=[3, 2], temperature=0.7, top_p=0.9
    )
    assert sampling_params({"num_beams": 1}, eos="</s>", special_tokens={}).temperature == 0


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"top_p": 2, "do_sample": True}, "top_p"),
    ],
)
def test_generation_arguments_without_a_meaning_are_refused_by_name(kwargs: dict, name: str) -> None:
    with pytest.raises(RequestError, match=name) as refused:
        sampling_params(kwargs, eos="</s>", special_tokens={})
    assert refused.value.field == name


def test_no_room_for_a_prompt_is_told_with_the_numbers(lm: JaxserveLM) -> None:
    with pytest.raises(RequestError, match=f"max_gen_toks=500 .* {lm.max_length}"):
        lm.generate_until(asked(("the", {"until": [], "max_gen_toks": 500})))


def test_a_rendered_chat_encodes_as_the_service_does(lm: JaxserveLM, llm: LLM) -> None:
    messages = [{"role": "user", "content": "the quick fox"}]
    assert lm.tok_encode(lm.apply_chat_template(messages)) == render_chat(llm.tokenizer, messages)
    begun = [*messages, {"role": "assistant", "content": "It jumps "}]
    text = lm.apply_chat_template(begun, add_generation_prompt=False)
    assert text.endswith("assistant\nIt jumps ")


def test_a_chat_evaluation_runs_with_examples(lm: JaxserveLM) -> None:
    results = evaluate(
        lm, ["tiny_greedy"], apply_chat_template=True, limit=2, gen_kwargs={"max_gen_toks": 2, "temperature": 0.0}
    )
    prompts = [sample["arguments"][0][0] for sample in results["samples"]["tiny_greedy"]]
    assert prompts[0] == "<|im_start|>user\nthe river<|im_end|>\n<|im_start|>assistant\n"


def test_the_harness_knows_the_model_by_name() -> None:
    assert get_model("jaxserve") is JaxserveLM


LEAN = (
    "import sys; sys.path.insert(0, 'scripts'); from evaluate import main; code = main(sys.argv[1:]);"
    "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
)


def script(*flags: str) -> subprocess.CompletedProcess[str]:
    """The script, which fails when torch or transformers get imported."""
    command = [sys.executable, "-c", LEAN, *flags]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)


def test_the_script_writes_its_report(tiny_folder: Path, results: dict, tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if value is not True]
    done = script(
        "--tasks", "river_*", "--include-path", str(DATA), "--model", str(tiny_folder), "--output", str(tmp_path),
        "--limit", "3", "--log-samples", "--batch-invariant", *flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "river_choices" in done.stdout and "river_perplexity" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["jaxserve"]["options"]["max_len"] == EXPECTED["context"]
    assert report["jaxserve"]["load"]["prefix_hit_tokens"] > 0
    assert report["n-samples"]["river_choices"] == {"original": 7, "effective": 3}
    assert "# Evaluation of tiny" in (tmp_path / "report.md").read_text()
    lines = (tmp_path / "samples_river_choices.jsonl").read_text().splitlines()
    # Another process, other mates: with --batch-invariant not a digit differs.
    scores = [[float(response[0][0]) for response in json.loads(line)["resps"]] for line in lines]
    assert scores == [[score for score, _ in choices] for choices in responses(results, "river_choices")[:3]]


def test_a_folder_that_is_not_there_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    done = script("--tasks", "river_choices", "--include-path", str(tmp_path / "tasks"), "--output", str(tmp_path))
    assert done.returncode == 2
    assert "tasks is not a folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full  # the harness reads its thousands of tasks: a quarter of a minute
def test_an_unknown_task_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    done = script("--tasks", "river_nowhere", "--include-path", str(DATA), "--output", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "river_nowhere" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
