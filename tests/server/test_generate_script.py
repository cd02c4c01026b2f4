"""The command-line client against a real server process, as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from server.pb.jaxserve.v1 import generation_pb2 as pb
from tests.server.processes import ROOT, read_until, script, start
from tests.server.serving import Served, serving, until
from tests.server.stub import ANSWER, StubEngine


@pytest.fixture(scope="module")
def engine() -> StubEngine:
    return StubEngine(step_seconds=0.002)


@pytest.fixture(scope="module")
def served(engine: StubEngine):
    with serving(engine) as served:
        yield served


def test_a_prompt_as_argument_is_answered_on_stdout(served: Served, engine: StubEngine) -> None:
    flags = ["--max-tokens", "8", "--temperature", "0"]
    result = script("generate.py", "--address", served.address, *flags, "The capital of France is")
    assert (result.returncode, result.stderr) == (0, "") and result.stdout == " Paris,\n"[:-1] + " \n"
    assert engine.requests[-1].params.temperature == 0
    assert bytes(engine.requests[-1].prompt_ids) == b"The capital of France is"


def test_a_prompt_on_stdin_is_taken_whole(served: Served, engine: StubEngine) -> None:
    result = script("generate.py", "--address", served.address, stdin="two\nlines\n")
    assert result.returncode == 0 and result.stdout == ANSWER + "\n"
    assert bytes(engine.requests[-1].prompt_ids) == b"two\nlines\n"


def test_every_sampling_field_has_a_flag_that_reaches_the_server(served: Served, engine: StubEngine) -> None:
    flags = {
        "max-tokens": "9", "min-tokens": "2", "n": "2", "temperature": "0.7", "top-k": "5", "top-p": "0.9",
        "min-p": "0.05", "presence-penalty": "0.5", "frequency-penalty": "-0.25", "repetition-penalty": "1.1",
        "logit-bias": "7=-1.5,8=2", "allowed-token-ids": "1,2,32", "banned-token-ids": "3", "seed": "-1", "stop": "END",
        "stop-token-ids": "4,5", "logprobs": "1", "prompt-logprobs": "0", "prompt-logprobs-start": "1",
        "bad-words": "no", "structured-outputs": '{"json": {"type": "integer"}}',
    }  # fmt: skip
    switches = [
        "--include-stop-str-in-output",
        "--ignore-eos",
        "--detokenize",
        "--no-skip-special-tokens",
        "--no-speculate",
    ]
    names = {*flags, *(switch.removeprefix("--").removeprefix("no-") for switch in switches)}
    assert names == {field.name.replace("_", "-") for field in pb.SamplingParams.DESCRIPTOR.fields}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    more = ["--chat", "--system", "be brief", "--priority", "3", "--cache-salt", "me", "--id", "mine"]
    result = script("generate.py", "--address", served.address, *arguments, *switches, *more, "hi")
    assert result.returncode == 0, result.stderr
    request = engine.requests[-1]
    params = request.params
    assert (request.id, request.priority, request.cache_salt) == ("mine", 3, "me")
    assert (params.max_tokens, params.min_tokens, params.n, params.temperature, params.top_k) == (9, 2, 2, 0.7, 5)
    assert (params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty) == (0.9, 0.05, 0.5, -0.25)
    assert (params.repetition_penalty, params.logit_bias, params.allowed_token_ids) == (
        1.1,
        {7: -1.5, 8: 2},
        (1, 2, 32),
    )
    assert (params.banned_token_ids, params.seed, params.stop, params.stop_token_ids) == (
        (3,),
        2**64 - 1,
        ("END",),
        (4, 5),
    )
    assert (params.logprobs, params.prompt_logprobs, params.prompt_logprobs_start) == (1, 0, 1)
    assert params.include_stop_str_in_output and params.ignore_eos and params.detokenize
    assert not params.skip_special_tokens and not params.speculate
    assert params.bad_words == ("no",) and params.structured_outputs.json == '{"type":"integer"}'
    assert "--- 0 ---" in result.stdout and "--- 1 ---" in result.stdout
    assert result.stderr.count("token 0:") == 9 and "prompt 0:" in result.stderr


def test_token_ids_in_and_out(served: Served, engine: StubEngine) -> None:
    flags = ["--token-ids", "--no-detokenize", "--max-tokens", "3"]
    result = script("generate.py", "--address", served.address, *flags, "10,20 30")
    assert result.stdout == "32 80 97 \n" and engine.requests[-1].prompt_ids == (10, 20, 30)


def test_json_prints_every_message(served: Served) -> None:
    result = script("generate.py", "--address", served.address, "--json", "--max-tokens", "4", "hi")
    messages = [json.loads(line) for line in result.stdout.splitlines()]
    assert messages[-1]["finish"]["reason"] == "FINISH_REASON_LENGTH"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--top-p", "7", "hi"], "top_p must be between"),
        ([""], "text is empty"),
        (["--timeout", "0.2", "--ignore-eos", "hi"], "--timeout"),
    ],
)
def test_a_request_that_fails_is_one_sentence_and_exits_1(served: Served, flags: list[str], words: str) -> None:
    result = script("generate.py", "--address", served.address, *flags)
    assert result.returncode == 1 and words in result.stderr and result.stderr.count("\n") == 1


def test_no_server_is_said_so() -> None:
    result = script("generate.py", "--address", "127.0.0.1:9", "hi")
    assert result.returncode == 1
    assert result.stderr == "generate: no server answers at 127.0.0.1:9 (start one with: python scripts/serve.py)\n"


@pytest.mark.parametrize(
    "flags", [["--max-tokens", "3000000000", "x"], ["--top-k", "x", "x"], ["--logit-bias", "5", "x"]]
)
def test_a_wrong_flag_is_one_sentence_and_exits_2(flags: list[str]) -> None:
    result = script("generate.py", *flags)
    assert result.returncode == 2 and flags[0] in result.stderr and result.stderr.count("\n") == 1


@pytest.fixture
def patient() -> Iterator[tuple[Served, StubEngine]]:
    """An answer of ten seconds: one that is interrupted has not ended by itself, however busy the machine."""
    engine = StubEngine(step_seconds=0.02)
    with serving(engine) as served:
        yield served, engine


def test_ctrl_c_aborts_the_request_and_exits_130(patient: tuple[Served, StubEngine]) -> None:
    served, engine = patient
    process = start(["scripts/generate.py", "--address", served.address, "--ignore-eos", "hi"])
    read_until(process.stdout, "Paris")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert (process.returncode, error) == (130, "")
    until(lambda: engine.running == 0)


def test_a_pipe_that_closes_aborts_the_request(patient: tuple[Served, StubEngine]) -> None:
    served, engine = patient
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--address", served.address, "--ignore-eos", "hi"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(3)
    process.stdout.close()
    assert process.wait(10) == 1 and process.stderr is not None and process.stderr.read() == b""
    process.stderr.close()
    until(lambda: engine.running == 0)


def test_the_client_imports_neither_jax_nor_the_engine() -> None:
    names = "('jax', 'numpy', 'jaxserve.engine')"
    code = (
        f"import sys; sys.path.insert(0, 'scripts'); import generate; print([m for m in {names} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "[]\n"
