"""Batch files: every line has its answer or its error, once, however often the run is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server.batch_files import Output, read_lines
from tests.server.processes import ENVIRONMENT, ROOT, start
from tests.server.serving import until
from tests.server.stub import ANSWER

MODULE = "tests.server.run_stub_batch"


def line(custom_id: str, *, url: str = "/v1/completions", **body) -> str:
    body = body or {"prompt": "hi", "max_tokens": 60}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def run(source: Path, target: Path, *flags: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [*prefix, sys.executable, "-m", MODULE, str(source), str(target), *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=60)


def answers(target: Path) -> list[dict]:
    return [json.loads(text) for text in target.read_text().splitlines()]


BAD = [
    ("not json", "not JSON"),
    ("[]", "object"),
    ("{}", "custom_id"),
    ('{"custom_id": 5}', "custom_id"),
    ('{"custom_id": ""}', "custom_id"),
    (json.dumps({"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}), "method"),
    (json.dumps({"custom_id": "url", "method": "POST", "url": "/v1/embeddings", "body": {}}), "url"),
    (json.dumps({"custom_id": "extra", "method": "POST", "url": "/v1/completions", "body": {}, "x": 1}), "x"),
    (json.dumps({"custom_id": "nobody", "method": "POST", "url": "/v1/completions"}), "body"),
    (line("empty", prompt=""), "prompt"),
    (line("long", prompt="x" * 600), "600"),
    (line("unknown", prompt="x", user="me"), "user"),
    ("[" * 100_000, "deep"),
    ('{"custom_id": ' + "9" * 5000 + "}", "not JSON"),
    (json.dumps({"custom_id": "\ud800"}), "surrogate"),
]


def test_bad_and_duplicate_lines_get_an_error_and_the_rest_go_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    chat = line("chat", url="/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    lines = [line("a"), "", *(text for text, _ in BAD), line("a"), chat]
    source.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    result = run(source, target)
    assert result.returncode == 0, result.stderr
    by_number = {answer["id"]: answer for answer in answers(target)}
    assert len(by_number) == len(lines) - 1 + 1
    for number, (_, words) in enumerate(BAD, 3):
        answer = by_number[f"batch_req_{number}"]
        assert answer["response"] is None and words in answer["error"]["message"]
    first = by_number["batch_req_1"]
    assert first["custom_id"] == "a" and first["error"] is None and first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["text"] == ANSWER
    duplicate = by_number[f"batch_req_{len(lines) - 1}"]
    assert duplicate["custom_id"] == "a" and duplicate["error"]["code"] == "already_exists"
    message = by_number[f"batch_req_{len(lines)}"]["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": ANSWER}
    assert "2 answered, 17 errors" in result.stderr

    before = target.read_bytes()
    again = run(source, target)  # everything is done, error lines included
    assert again.returncode == 0 and target.read_bytes() == before and "19 done before" in again.stderr


def test_a_torn_last_line_is_dropped_and_a_rerun_appends_the_rest(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(f"id-{i}") for i in range(4)))
    assert run(source, target).returncode == 0
    whole = target.read_bytes()
    kept = whole.splitlines(keepends=True)[:2]
    target.write_bytes(b"".join(kept) + b'{"id": "batch_req_3", "custom_id": "id-')
    assert run(source, target).returncode == 0
    assert target.read_bytes().startswith(b"".join(kept))
    assert sorted(answer["custom_id"] for answer in answers(target)) == [f"id-{i}" for i in range(4)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, number: signal.Signals, code: int) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(f"id-{i}") for i in range(40)))
    process = start(["-m", MODULE, "--step-seconds", "0.004", "--in-flight", "4", str(source), str(target)])
    until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 5, seconds=20)
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert process.returncode == code
    done = target.read_bytes().count(b"\n")
    assert done < 40
    if number == signal.SIGINT:
        assert "run the same command to go on" in error and "Traceback" not in error
    result = run(source, target)
    assert result.returncode == 0 and f"{40 - done} answered" in result.stderr
    assert sorted(answer["custom_id"] for answer in answers(target)) == sorted(f"id-{i}" for i in range(40))


def test_a_full_disk_is_one_sentence_and_a_rerun_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(f"id-{i}") for i in range(8)))
    # Of the shell, not of a function run after a fork: a process that has used jax must not fork.
    result = run(source, target, prefix=("bash", "-c", 'ulimit -f 1; exec "$@"', "bash"))
    assert result.returncode == 1
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith(f"batch_generate: {target}: File too large") and "Traceback" not in result.stderr
    assert target.stat().st_size <= 1024
    assert run(source, target).returncode == 0
    assert sorted(answer["custom_id"] for answer in answers(target)) == [f"id-{i}" for i in range(8)]


def test_a_dead_engine_stops_the_run_and_blames_no_line(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(f"id-{i}", prompt="x", max_tokens=500, ignore_eos=True) for i in range(8)))
    result = run(source, target, "--step-seconds", "0.01", "--die-after", "0.3")
    assert result.returncode == 1 and "the engine has stopped: poisoned" in result.stderr
    assert "Traceback" not in result.stderr and answers(target) == []


def test_a_queue_smaller_than_the_batch_refuses_nobody(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(f"id-{i}", prompt="x", n=3) for i in range(12)))
    result = run(source, target, "--queue-limit", "5")
    assert result.returncode == 0 and "12 answered, 0 errors" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/none", "{tmp}/out"], "not a file"),
        (["{tmp}/in", "{tmp}/in"], "same file"),
        (["{tmp}/in", "{tmp}/other"], "line 1 is no line of a batch's output"),
        (["{tmp}/in", "{tmp}/no/such/folder"], "No such file"),
        (["{tmp}/in", "{tmp}/out", "--in-flight", "-1"], "in_flight=-1"),
        (["{tmp}/in", "{tmp}/out", "--slots", "0"], "slots=0"),
    ],
)
def test_wrong_files_and_flags_are_one_sentence_and_exit_2(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "in").write_text(line("a"))
    (tmp_path / "other").write_text("someone's notes\n")
    result = run(*(argument.format(tmp=tmp_path) for argument in arguments))  # pyright: ignore[reportArgumentType]
    assert result.returncode == 2 and words in result.stderr and result.stderr.count("\n") == 1
    assert (tmp_path / "other").read_text() == "someone's notes\n"


def test_progress_is_shown_on_stderr_only(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_text(line("a"))
    result = run(source, tmp_path / "out")
    assert result.stdout == "" and "1/1" in result.stderr


def test_a_line_over_the_limit_is_told_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.batch_files.MAX_LINE_BYTES", 200)
    source = tmp_path / "in"
    source.write_text("\n".join([line("a"), line("b", prompt="x" * 1000), line("c")]))
    first, second, third = read_lines(source)
    assert (first.custom_id, second.number, third.custom_id) == ("a", 2, "c")
    assert second.error is not None and "over 200 bytes" in second.error.message


def test_lines_are_read_as_they_are_needed(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_text("\n".join(line(f"id-{i}") for i in range(3)))
    lines = read_lines(source)
    assert next(lines).custom_id == "id-0"
    source.write_text("")  # the rest was not read ahead beyond one buffer; what follows is simply the end
    lines.close()


def test_every_prefix_of_an_output_can_be_gone_on_from(tmp_path: Path) -> None:
    """kill -9 at any byte: what is whole counts as done, what is torn is dropped."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join([line("a"), "bad", line("ü")]))
    lines = list(read_lines(source))
    output = Output.open(target)
    for each in lines:
        output.write(each, error=each.error, body={})
    output.close()
    whole = target.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in {
        0,
        1,
        len(whole) // 2,
        *(end + shift for end in ends for shift in (-2, -1, 0, 1) if end + shift <= len(whole)),
    }:
        target.write_bytes(whole[:size])
        output = Output.open(target)
        done = sum(output.has(each) for each in lines)
        output.close()
        assert done == whole[:size].count(b"\n")
        assert target.read_bytes() == b"".join(whole.splitlines(keepends=True)[:done])
