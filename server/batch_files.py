"""The files of an offline batch, in OpenAI's format: input lines in, answer lines out, and what a rerun may skip.

Files only: nothing here runs a request.  The whole file is never in memory, only the ids of its lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.request import ErrorCode, RequestError
from server.json_types import Json, load_json, quote, text, wrong
from server.openai_fields import Kind, refuse_unknown
from server.openai_schema import URLS

MAX_LINE_BYTES = 64 * 2**20
MAX_CUSTOM_ID = 512  # characters
FIELDS = ("custom_id", "method", "url", "body")
DUPLICATE = ErrorCode.ALREADY_EXISTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of the input; `error` when it cannot be one."""

    number: int  # from 1, blank lines counted
    custom_id: str | None = None
    kind: Kind = "completion"
    body: Json = None
    error: RequestError | None = None


def read_lines(path: Path) -> Iterator[Line]:
    """The input's lines, lazily; a bad one is told by its `error`, blank ones are left out."""
    seen: set[str] = set()
    for number, raw in _raw_lines(path):
        line = _parse(number, raw)
        if line.error is None and line.custom_id in seen:
            error = RequestError(f"custom_id {quote(line.custom_id)} stands on an earlier line", code=DUPLICATE)
            line = Line(number=number, custom_id=line.custom_id, error=error)
        if line.custom_id is not None:
            seen.add(line.custom_id)
        yield line


def count_lines(path: Path) -> int:
    """How many `read_lines` will yield."""
    return sum(1 for _ in _raw_lines(path))


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered from 1, blank ones left out, none longer than one byte over the limit."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            rest = raw
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES)
            if raw.strip():
                yield number, raw


def _parse(number: int, raw: bytes) -> Line:
    custom_id = None
    try:
        if len(raw) > MAX_LINE_BYTES:
            raise RequestError(f"the line has over {MAX_LINE_BYTES} bytes")
        record = load_json(raw, "the line")
        if not isinstance(record, dict):
            raise wrong("the line", "a JSON object", record)
        if "custom_id" not in record:
            raise RequestError("custom_id is missing", field="custom_id")
        custom_id = text("custom_id", record["custom_id"])
        if not 0 < len(custom_id) <= MAX_CUSTOM_ID:
            custom_id = None
            raise RequestError(f"custom_id must have 1 to {MAX_CUSTOM_ID} characters", field="custom_id")
        refuse_unknown(record, FIELDS)
        if record.get("method") != "POST":
            raise RequestError(f"method must be POST, got {quote(record.get('method'))}", field="method")
        url = record.get("url")
        if not isinstance(url, str) or url not in URLS:
            raise RequestError(f"url must be {' or '.join(URLS)}, got {quote(url)}", field="url")
        return Line(number=number, custom_id=custom_id, kind=URLS[url], body=record.get("body"))
    except RequestError as error:
        return Line(number=number, custom_id=custom_id, error=error)


@dataclass
class Output:
    """The answer file: append-only, each line on its way to the disk before the next begins."""

    path: Path
    done_ids: set[str] = field(default_factory=set)  # custom ids that have their answer
    done_lines: set[int] = field(default_factory=set)  # lines that have an error line, but no custom id of their own
    _file: int = -1

    @staticmethod
    def open(path: Path) -> Output:
        """Drops a torn last line, learns what is done.  ValueError when the file is something else."""
        output = Output(path)
        output._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if path.is_file():
            output._drop_torn_line()
            output._learn()
        return output

    def close(self) -> None:
        os.close(self._file)

    def has(self, line: Line) -> bool:
        """An earlier run has answered this line."""
        if line.custom_id is None or (line.error is not None and line.error.code is DUPLICATE):
            return line.number in self.done_lines
        return line.custom_id in self.done_ids

    def write(self, line: Line, *, body: Json = None, error: RequestError | None = None) -> None:
        """One answer line.  OSError when the disk does not take it; what was written of it is dropped by a rerun."""
        response, failure = None, None
        if error is None:
            response = {"status_code": 200, "request_id": f"batch-{line.number}", "body": body}
        else:
            failure = {"code": error.code.value, "message": error.message, "param": error.field}
        record = {"id": f"batch_req_{line.number}", "custom_id": line.custom_id, "response": response, "error": failure}
        rest = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode())
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _drop_torn_line(self) -> None:
        end = os.fstat(self._file).st_size
        while end:
            begin = max(0, end - 2**16)
            newline = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        os.ftruncate(self._file, end)

    def _learn(self) -> None:
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    record = json.loads(raw)
                    custom_id, line = record["custom_id"], int(record["id"].removeprefix("batch_req_"))
                    code = (record["error"] or {}).get("code")
                except (ValueError, TypeError, KeyError, AttributeError):
                    raise ValueError(
                        f"{self.path} line {number} is no line of a batch's output: name another file"
                    ) from None
                if custom_id is None or code == DUPLICATE.value:
                    self.done_lines.add(line)
                else:
                    self.done_ids.add(custom_id)
