"""The clients: each sends one ask after the other over its front and tells what became of it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import grpc

from scripts.soak_parts.asks import Ask
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc

TIMEOUT = 300.0  # seconds; whatever takes longer hangs
COMPLETE = ("OK", "200 done")  # statuses of what was read to its end


@dataclass(slots=True)
class Told:
    """What one request's client saw."""

    ask: Ask
    status: str = ""
    is_accepted: bool = False  # the server has said that it is queued
    ends: list[int] = field(default_factory=list)  # index of each sample, as its last message came
    tokens: int = 0  # that the last messages count
    faults: list[str] = field(default_factory=list)


class Client:
    """Speaks both fronts of one server."""

    def __init__(self, grpc_address: str, http_base: str):
        self._channel = grpc.insecure_channel(grpc_address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = pb_grpc.GenerationStub(self._channel)
        self._netloc = urlsplit(http_base).netloc

    def close(self) -> None:
        self._channel.close()

    def send(self, ask: Ask) -> Told:
        told = Told(ask)
        try:
            (self._send_grpc if ask.front == "grpc" else self._send_http)(told)
        except Exception as error:  # a client that breaks is a finding, not the end of the soak
            told.faults.append(f"{type(error).__name__}: {error}")
        if told.status in COMPLETE and sorted(told.ends) != list(range(ask.n)):
            told.faults.append(f"{ask.n} samples, but these ended: {sorted(told.ends)}")
        if len(set(told.ends)) != len(told.ends):
            told.faults.append(f"a sample ended twice: {told.ends}")
        return told

    # -- gRPC ----------------------------------------------------------------------------------------------------

    def _send_grpc(self, told: Told) -> None:
        ask = told.ask
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ask.prompt), params=pb.SamplingParams(**ask.params))  # pyright: ignore[reportArgumentType]
        call = self._stub.GenerateStream(request, timeout=ask.seconds if ask.way == "deadline" else TIMEOUT)
        try:
            metadata = dict(call.initial_metadata())
            told.is_accepted = "jaxserve-request-id" in metadata
            self._read(told, self._outputs(call), lambda: self._abort(metadata["jaxserve-request-id"]), call.cancel)
        except grpc.RpcError:  # the call itself says what happened
            pass
        told.status = call.code().name
        expected = {"finish": ("OK",), "leave": ("OK", "CANCELLED"), "abort": ("OK", "CANCELLED"),
                    "deadline": ("OK", "DEADLINE_EXCEEDED")}  # fmt: skip
        if told.status not in expected[ask.way]:
            told.faults.append(f"{told.status}: {call.details()}")

    def _outputs(self, call: Iterator[pb.Output]) -> Iterator[tuple[int, int | None]]:
        """-> sample, and its tokens in all when it has ended."""
        for output in call:
            yield output.index, output.finish.completion_tokens if output.HasField("finish") else None

    def _abort(self, request_id: str) -> None:
        self._stub.Abort(pb.AbortRequest(id=request_id), timeout=TIMEOUT)

    # -- HTTP ----------------------------------------------------------------------------------------------------

    def _send_http(self, told: Told) -> None:
        ask = told.ask
        body = {"prompt": list(ask.prompt), "stream": True, "stream_options": {"include_usage": True}} | ask.params
        connection = http.client.HTTPConnection(self._netloc, timeout=TIMEOUT)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            told.status, told.is_accepted = str(answer.status), answer.status == 200
            if answer.status != 200:
                told.faults.append(f"{answer.status}: {answer.read()[:300]!r}")
                return
            self._read_http(told, answer, connection)
        finally:
            connection.close()

    def _read_http(self, told: Told, answer: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> None:
        ids: list[str] = []
        errors: list[str] = []

        def choices() -> Iterator[tuple[int, int | None]]:
            for event in _events(answer):
                if "error" in event:
                    errors.append(str(event["error"]["code"]))
                    return
                if not ids:
                    ids.append(event["id"])
                if event.get("usage") is not None:
                    told.tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    yield choice["index"], 0 if choice["finish_reason"] is not None else None
            told.status = COMPLETE[1]

        self._read(told, choices(), lambda: self._abort(ids[0].partition("-")[2]), connection.close)
        if errors and not (told.ask.way == "abort" and errors == ["cancelled"]):
            told.faults.append(f"the stream ended with {errors[0]}")

    # -- both ----------------------------------------------------------------------------------------------------

    def _read(
        self,
        told: Told,
        messages: Iterator[tuple[int, int | None]],
        abort: Callable[[], None],
        leave: Callable[[], object],
    ) -> None:
        """Reads to the end, or as long as the ask's patience lasts."""
        way = told.ask.way
        if way == "leave" and not told.ask.patience:
            leave()
            return
        for seen, (index, tokens) in enumerate(messages, start=1):
            if tokens is not None:
                told.ends.append(index)
                told.tokens += tokens
            if way == "leave" and seen >= told.ask.patience:
                leave()
                return
            if way == "abort" and seen == max(told.ask.patience, 1):
                abort()


def _events(answer: http.client.HTTPResponse) -> Iterator[dict]:
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def run_clients(asks: list[Ask], clients: list[Client], *, progress: Callable[[Told], None]) -> list[Told]:
    """Every client takes the next ask as soon as it is free.  -> by number."""
    waiting, told, lock = iter(asks), [], threading.Lock()

    def work(client: Client) -> None:
        while True:
            with lock:
                ask = next(waiting, None)
            if ask is None:
                return
            result = client.send(ask)
            with lock:
                told.append(result)
                progress(result)

    threads = [threading.Thread(target=work, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(told, key=lambda result: result.ask.number)
