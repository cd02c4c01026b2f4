"""What the fronts cost: streamed tokens per second, and how late they come, with an engine that costs nothing.

`python scripts/bench_front.py`: the tests' stub engine in a serving process of its own, the client here.  Each token's
text is the time at which it was drawn, so the client knows its age on arrival (one machine, one clock).

* flood: the engine draws as fast as it can; what readers have not taken is merged, as in life.
* paced: every stream gets a token per step, at half of the rate that is wanted; the latency is what the front, the
  socket and the client add, the worst place in a step's burst included."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field

import _path  # noqa: F401  first: it makes the imports below work
import grpc.aio

from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc
from tests.server.processes import Serving, serving_process

WANTED = {"http": 5_000, "grpc": 10_000}  # streamed tokens per second
WANTED_P99 = 5.0  # ms
STAMPS = re.compile(rb'(?:"text":"|"content":")((?:\d+ )+)')


@dataclass
class Seen:
    """What has arrived."""

    ages: list[float] = field(default_factory=list)  # seconds, of each token
    frames: int = 0
    begin: float = 0.0
    end: float = 0.0

    def take(self, stamps: bytes | str) -> None:
        self.end = time.monotonic()
        self.begin = self.begin or self.end
        self.frames += 1
        self.ages.extend(self.end - int(stamp) / 1e9 for stamp in stamps.split())

    @property
    def rate(self) -> float:
        return len(self.ages) / (self.end - self.begin)

    def percentile(self, share: float) -> float:
        """ms"""
        ages = sorted(self.ages)
        return 1e3 * ages[min(len(ages) - 1, int(share * len(ages)))]


async def read_http(server: Serving, tokens: int, seen: Seen) -> None:
    """The plainest reader there is: the client should not be what is measured."""
    host, _, port = server.http.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": [1], "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    whole = rest = b""
    while b"[DONE]" not in whole:
        part = await reader.read(65536)
        if not part:
            raise ConnectionError(f"the stream ended early: {rest[-200:]!r}")
        whole, _, rest = (rest + part).rpartition(b"\n\n")
        for match in STAMPS.finditer(whole):
            seen.take(match[1])
    writer.close()


async def read_grpc(stub: pb_grpc.GenerationStub, tokens: int, seen: Seen) -> None:
    params = pb.SamplingParams(max_tokens=tokens, ignore_eos=True)
    async for message in stub.GenerateStream(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), params=params)):
        if message.text:
            seen.take(message.text)


async def run(front: str, server: Serving, streams: int, tokens: int) -> Seen:
    seen = Seen()
    if front == "http":
        await asyncio.gather(*(read_http(server, tokens, seen) for _ in range(streams)))
        return seen
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        stub = pb_grpc.GenerationStub(channel)
        await asyncio.gather(*(read_grpc(stub, tokens, seen) for _ in range(streams)))
    return seen


def measure(front: str, streams: int, tokens: int, step_seconds: float) -> Seen:
    with serving_process("--stamped", "--step-seconds", str(step_seconds)) as server:
        asyncio.run(run(front, server, 4, 20))  # warm
        seen = asyncio.run(run(front, server, streams, tokens))
    assert len(seen.ages) <= streams * tokens, "more tokens than were asked for"
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=WANTED, help="one front")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long each measurement takes")
    flags = parser.parse_args()
    for front, wanted in WANTED.items():
        if flags.only not in (None, front):
            continue
        flood = measure(front, flags.streams, int(wanted * flags.seconds / flags.streams), 0.0)
        frames = flood.frames / (flood.end - flood.begin)
        print(f"{front} flood: {flood.rate:,.0f} tok/s in {frames:,.0f} frames/s (wanted {wanted:,} tok/s)")
        step = flags.streams / (wanted / 2)
        paced = measure(front, flags.streams, int(flags.seconds / step), step)
        late = f"p50 {paced.percentile(0.5):.2f} ms, p99 {paced.percentile(0.99):.2f} ms (wanted {WANTED_P99:g})"
        print(f"{front} paced: {paced.rate:,.0f} tok/s to {flags.streams} streams, {late}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
