"""Runs a batch file offline: `python scripts/batch_generate.py IN.jsonl OUT.jsonl [--model REF] ...`

OpenAI's batch format: each input line is {"custom_id", "method": "POST", "url", "body"}, each output line its response
or its error, in the order they end.  Interrupted in any way, the same command goes on where it stopped.

Exit codes: 0 every line has its answer or its error, 1 the disk or the engine failed, 2 wrong flags or files,
130 Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import _path  # noqa: F401  first: it makes the imports below work
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxserve.config import EngineConfig
from jaxserve.request import Chunk, RequestError
from server.args import Parser, ServerConfig, add_flags, choose_platform, config_of
from server.backend import Backend
from server.batch_files import Line, Output, count_lines, read_lines
from server.calls import submitted
from server.limits import Limits
from server.openai_response import body_of
from server.openai_schema import Asked, asked_of

FULL_WAIT = 0.05  # seconds between tries when the engine's queue is full


class Failure(Exception):
    """The batch cannot go on; one clear sentence, exit code 1."""


def load(config: EngineConfig) -> Backend:
    """The engine, warm and started."""
    from jaxserve.start import load_engine  # imports jax

    engine = load_engine(config, console=Console(stderr=True))
    engine.start()
    return engine


def main(argv: Sequence[str] | None = None, load: Callable[[EngineConfig], Backend] = load) -> int:
    parser = Parser("Run an OpenAI batch file offline.")
    parser.add_argument("input", type=Path, metavar="IN.jsonl")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--in-flight", type=int, default=0, help="requests open at once (default: twice the slots)")
    add_flags(parser, EngineConfig)
    flags = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    try:
        return run(flags, config_of(flags, EngineConfig), load)
    except ValueError as error:
        parser.error(str(error))
    except (OSError, Failure) as error:
        reason = f"{error.filename or flags.output}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"batch_generate: {reason}; what is written stays, run the same command to go on", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("batch_generate: stopped; run the same command to go on", file=sys.stderr)
        return 130


def run(flags: argparse.Namespace, config: EngineConfig, load: Callable[[EngineConfig], Backend]) -> int:
    """Opens the files before the model is loaded: that is where most mistakes are."""
    if flags.in_flight < 0:
        raise ValueError(f"in_flight={flags.in_flight} must be at least 1 (0 = twice the slots)")
    if not flags.input.is_file():
        raise ValueError(f"{flags.input} is not a file")
    if flags.output.exists() and flags.output.samefile(flags.input):
        raise ValueError("IN.jsonl and OUT.jsonl are the same file")
    total = count_lines(flags.input)
    try:
        output = Output.open(flags.output)
    except OSError as error:
        raise ValueError(f"{flags.output}: {error.strerror}") from None
    choose_platform(config.accelerator)
    backend = load(config)
    try:
        with _progress() as progress:
            batch = Batch(backend, output, progress, in_flight=flags.in_flight or 2 * config.slots, total=total)
            asyncio.run(batch.run(flags.input))
    finally:
        backend.stop(0)
        output.close()
    print(f"batch_generate: {batch.summary}", file=sys.stderr)
    return 0


class Batch:
    """Lines in, answer lines out, at most `in_flight` of them open."""

    def __init__(self, backend: Backend, output: Output, progress: Progress, *, in_flight: int, total: int):
        self._backend = backend
        self._output = output
        self._limits = Limits.of(ServerConfig(), backend)
        self._models = list(dict.fromkeys((backend.info.name, backend.config.model)))
        self._progress = progress
        self._bar = progress.add_task("batch", total=total, tokens=0)
        self._room = asyncio.Semaphore(in_flight)
        self._open = 0  # requests the engine has
        self._counts = {"answered": 0, "errors": 0, "done before": 0}
        self._tokens = 0

    @property
    def summary(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self._counts.items()) + f", {self._tokens} tokens"

    async def run(self, path: Path) -> None:
        """Raises OSError or Failure as soon as one line does; CancelledError after SIGINT or SIGTERM."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            async with asyncio.TaskGroup() as group:
                for line in read_lines(path):
                    if self._output.has(line):
                        self._count("done before")
                        await asyncio.sleep(0)
                    else:
                        await self._room.acquire()
                        group.create_task(self._answer(line))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, line: Line) -> None:
        try:
            if line.error is not None:
                raise line.error
            asked = await asyncio.to_thread(self._translate, line)
            samples = await self._samples(asked)
            body = body_of(
                asked,
                samples,
                model=self._backend.info.name,
                created=int(time.time()),
                tokenizer=self._backend.tokenizer,
            )
            self._output.write(line, body=body)
            self._tokens += sum(len(sample.token_ids) for sample in samples)
            self._count("answered")
        except RequestError as error:
            self._output.write(line, error=error)
            self._count("errors")
        finally:
            self._room.release()

    def _translate(self, line: Line) -> Asked:
        asked = asked_of(
            line.body,
            line.kind,
            request_id=f"batch-{line.number}",
            models=self._models,
            tokenizer=self._backend.tokenizer,
            limits=self._limits,
            now=time.monotonic(),
        )
        if asked.stream:
            raise RequestError("stream must be false: this answer comes as a whole", field="stream")
        if asked.user is not None:
            raise RequestError("user is for a server's log: a batch file has custom_id", field="user")
        return asked

    async def _samples(self, asked: Asked) -> list[Chunk]:
        """One whole chunk per choice.  RequestError for this line's fault, Failure for the engine's."""
        count = len(asked.requests) * asked.n
        while self._open and not self._backend.has_room(count):
            await asyncio.sleep(FULL_WAIT)
        if self._backend.failure is not None:
            raise Failure(f"the engine has stopped: {self._backend.failure}")
        self._open += 1
        try:
            with submitted(asked.requests, self._backend) as running:
                return await running.samples()
        except RequestError:
            if self._backend.failure is not None:  # every open line would get an error line of which none is its fault
                raise Failure(f"the engine has stopped: {self._backend.failure}") from None
            raise
        finally:
            self._open -= 1

    def _count(self, what: str) -> None:
        self._counts[what] += 1
        self._progress.update(self._bar, completed=sum(self._counts.values()), tokens=self._tokens)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


if __name__ == "__main__":
    sys.exit(main())
