"""One soak: asks to clients, numbers before and after, and the server's end."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import Callable

import grpc

from scripts.soak_parts.asks import Ask, random_ask
from scripts.soak_parts.book import Book, Check, Numbers, is_idle
from scripts.soak_parts.clients import Client, Told, run_clients
from scripts.soak_parts.process import ServerProcess
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc

IDLE_SECONDS = 30.0  # after the last client has gone


def soak(
    server: ServerProcess, *, requests: int, clients: int, seed: int, progress: Callable[[int], None] | None = None
) -> tuple[list[Told], list[Check]]:
    """Sends everything, then ends the server.  progress: told how many requests have ended, at every hundred."""
    with grpc.insecure_channel(server.grpc) as channel:
        info = pb_grpc.GenerationStub(channel).ModelInfo(pb.ModelInfoRequest())
    with urllib.request.urlopen(f"{server.http}/tokenizer_info", timeout=30) as answer:
        vocab = min(info.vocab, json.load(answer)["vocab_size"])  # over HTTP only ids with a text are taken
    asks = [random_ask(number, seed, vocab=vocab, max_len=info.max_len) for number in range(requests)]
    third = requests // 3
    speakers = [Client(server.grpc, server.http) for _ in range(clients)]
    first = server.numbers()
    told = _send(asks[:third], speakers, progress, before=0)
    warm = server.numbers()
    told += _send(asks[third:], speakers, progress, before=third)
    last = _when_idle(server)
    for speaker in speakers:
        speaker.close()
    book = Book(told=told, first=first, warm=warm, last=last, exit_code=server.terminate())
    return told, book.checks()


def _send(
    asks: list[Ask], speakers: list[Client], progress: Callable[[int], None] | None, *, before: int
) -> list[Told]:
    counts = itertools.count(before + 1)

    def count_one(_: Told) -> None:
        count = next(counts)
        if progress is not None and count % 100 == 0:
            progress(count)

    return run_clients(asks, speakers, progress=count_one)


def _when_idle(server: ServerProcess) -> Numbers:
    end = time.monotonic() + IDLE_SECONDS
    while not is_idle(numbers := server.numbers()) and time.monotonic() < end:
        time.sleep(0.05)
    return numbers
