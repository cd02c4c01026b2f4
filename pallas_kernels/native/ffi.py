"""How XLA calls a kernel: the handler of its FFI, written in IR too.

The offsets are those of XLA's `xla/ffi/api/c_api.h`, version 0.3: stable by its own word until a major version."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from pallas_kernels.native.code import ADDRESS, INT32, INT64, Code, number
from pallas_kernels.native.team import Work, share, worker_of

# Bytes into XLA_FFI_CallFrame, and into what hangs from it.
_EXTENSION, _API, _ARGUMENTS, _RESULTS = 8, 16, 72, 112
_EXTENSION_KIND, _METADATA, _METADATA_VERSION, _METADATA_TRAITS = 8, 24, 24, 32
_API_VERSION = 32
_BUFFER_DATA, _BUFFER_DIMS = 24, 40


class Buffer:
    """An operand or a result of the call."""

    def __init__(self, code: Code, buffers: ir.Value, index: int):
        self._code = code
        self._buffer = code.field(buffers, 8 * index, ADDRESS)

    def data(self) -> ir.Value:
        """Its address as an int64."""
        return self._code.field(self._buffer, _BUFFER_DATA, INT64)

    def dim(self, axis: int) -> ir.Value:
        return self._code.field(self._code.field(self._buffer, _BUFFER_DIMS, ADDRESS), 8 * axis, INT64)


# Given the operand of an index and the result: how many units the call has, and the words that each of them is given.
Prepare = Callable[[Code, Callable[[int], Buffer], Buffer], tuple[ir.Value, Sequence[ir.Value]]]


def handler(module: ir.Module, name: str, prepare: Prepare, work: Work, *, lanes: int) -> None:
    """Add a handler called `name` to the module."""
    worker = worker_of(module, f"{name}_worker", work, lanes=lanes)
    code = Code(module, name, [ADDRESS], lanes=lanes, result=ADDRESS)
    b, frame, no_error = code.build, code.arguments[0], ir.Constant(ADDRESS, None)
    extension = code.field(frame, _EXTENSION, ADDRESS)
    with b.if_then(b.icmp_unsigned("!=", b.ptrtoint(extension, INT64), number(0)), likely=False):
        _answer_query(code, frame, extension)
    arguments, results = code.field(frame, _ARGUMENTS, ADDRESS), code.field(frame, _RESULTS, ADDRESS)
    units, words = prepare(code, lambda index: Buffer(code, arguments, index), Buffer(code, results, 0))
    share(code, worker, units, words)
    b.ret(no_error)


def _answer_query(code: Code, frame: ir.Value, extension: ir.Value) -> None:
    """XLA may ask what the handler was written for instead of running it."""
    b = code.build
    with b.if_then(b.icmp_signed("==", code.field(extension, _EXTENSION_KIND, INT32), number(1, INT32))):
        metadata, api = code.field(extension, _METADATA, ADDRESS), code.field(frame, _API, ADDRESS)
        code.set_field(metadata, _METADATA_VERSION, code.field(api, _API_VERSION, INT64))
        code.set_field(metadata, _METADATA_TRAITS, number(0, INT32))
        b.ret(ir.Constant(ADDRESS, None))
