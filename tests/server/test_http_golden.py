"""Every frame and body, byte for byte, in tests/data/server/: a change of one is a change for every client.

Ids and times are replaced.  Write them anew with `python -m tests.server.test_http_golden`, and read the diff."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.args import ServerConfig
from tests.server.http_client import Reply, post, send
from tests.server.serving import Served, serving
from tests.server.stub import StubEngine

FOLDER = Path(__file__).parents[1] / "data" / "server"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
USAGE = {"stream_options": {"include_usage": True}}
SHORT = {"max_tokens": 3, "seed": 5}

# name -> path, body; None: a GET
CALLS: dict[str, tuple[str, dict | None]] = {
    "completion": ("/v1/completions", {"prompt": "hi", **SHORT}),
    "completion_stream": ("/v1/completions", {"prompt": "hi", "max_tokens": 20, "seed": 5, "stream": True}),
    "completion_many": (
        "/v1/completions",
        {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1, "return_token_ids": True, **SHORT},
    ),
    "completion_many_stream": ("/v1/completions", {"prompt": [[97], [98]], **SHORT, "stream": True, **USAGE}),
    "completion_everything_stream": (
        "/v1/completions",
        {
            "prompt": "é", "echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "stop": "ris",
            "seed": 5, "stream": True, **USAGE,
        },
    ),
    "chat": ("/v1/chat/completions", {"messages": CHAT, **SHORT}),
    "chat_logprobs": ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 1, **SHORT}),
    "chat_stream": ("/v1/chat/completions", {"messages": CHAT, "seed": 5, "stream": True, **USAGE}),
    "chat_everything_stream": (
        "/v1/chat/completions",
        {
            "messages": CHAT, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 0, "return_token_ids": True,
            "stop_token_ids": [110], "seed": 5, "stream": True,
        },
    ),
    "error": ("/v1/completions", {"prompt": "x", "best_of": 2}),
    "models": ("/v1/models", None),
    "tokenize": ("/tokenize", {"messages": CHAT}),
    "detokenize": ("/detokenize", {"tokens": [104, 105]}),
    "tokenizer_info": ("/tokenizer_info", None),
    "health": ("/health", None),
    "ready": ("/ready", None),
    "openapi": ("/openapi.json", None),
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(StubEngine(is_paced=True), ServerConfig(http_port=0)) as served:
        yield served


def transcript(served: Served, name: str) -> str:
    path, body = CALLS[name]
    reply = send(served.http, "GET", path) if body is None else post(served.http, path, **body)
    return normalised(reply)


def normalised(reply: Reply) -> str:
    kept = {name: value for name, value in sorted(reply.headers.items()) if name not in ("date", "content-length")}
    head = [f"HTTP {reply.status}", *(f"{name}: {value}" for name, value in kept.items())]
    text = "\n".join([*head, "", reply.body.decode()])
    text = re.sub(r"\b[0-9a-f]{32}\b", "ID", text)
    return re.sub(r'("created": ?)\d+', r"\1TIME", text)


@pytest.mark.parametrize("name", CALLS)
def test_every_byte_is_as_it_was(served: Served, name: str) -> None:
    assert transcript(served, name) == (FOLDER / f"{name}.txt").read_text()


def test_no_transcript_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CALLS)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with serving(StubEngine(is_paced=True), ServerConfig(http_port=0)) as served:
        for name in CALLS:
            (FOLDER / f"{name}.txt").write_text(transcript(served, name))


if __name__ == "__main__":
    sys.exit(main())
