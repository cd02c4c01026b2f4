"""KV write on the CPU, in place, by copies of whole heads (`pallas_kernels.native`): XLA's own scatter of 32 tokens wakes
a thread to share them, which takes longer than the copies do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from llvmlite import ir

from pallas_kernels.native.code import BIT, BYTE, FLOATS, INT32, INT64, VOID, Code, intrinsic, number
from pallas_kernels.native.ffi import Buffer, handler
from pallas_kernels.native.host import host, register
from pallas_kernels.registry import custom_call

NAME = "jaxserve_kv_write"
TOGETHER = 64  # tokens of a unit: a decode step's are too few to share


def kv_write(
    data: Array,
    layer: Array,
    k: Array,
    v: Array,
    page_table: Array,
    positions: Array,
    valid: Array,
    *,
    num_pages: int,
) -> Array:
    """See the package's `kv_write`.  Serves float32 pools alone; ValueError for others."""
    if data.dtype != jnp.float32:
        raise ValueError(f"serves float32 pools alone, got {data.dtype}")
    first_page = (layer * num_pages).reshape(1)
    call = jax.ffi.ffi_call(_ready(), jax.ShapeDtypeStruct(data.shape, data.dtype), input_output_aliases={0: 0})
    return call(data, k, v, page_table, positions, valid, first_page)


@custom_call
def _ready() -> str:
    module = ir.Module(NAME)
    handler(module, NAME, _prepare, _write_tokens, lanes=host().lanes)
    register(module, NAME)
    return NAME


def _prepare(code: Code, argument: Callable[[int], Buffer], result: Buffer) -> tuple[ir.Value, Sequence[ir.Value]]:
    k, positions = argument(1), argument(4)
    tokens = code.build.mul(positions.dim(0), positions.dim(1))
    shape = (tokens, positions.dim(1), argument(3).dim(1), k.dim(2), result.dim(3), k.dim(3))
    words = (result.data(), *(argument(i).data() for i in range(1, 7)), *shape)
    return code.rounded_up(tokens, TOGETHER), words


def _write_tokens(code: Code, words: Sequence[ir.Value], unit: ir.Value) -> None:
    b, ints = code.build, INT32.as_pointer()
    data, k, v = (b.inttoptr(word, FLOATS) for word in words[:3])
    table, positions = (b.inttoptr(word, ints) for word in words[3:5])
    valid, first_page = b.inttoptr(words[5], BYTE.as_pointer()), b.inttoptr(words[6], ints)
    tokens, queries, pages, heads, page_size, head_dim = words[7:13]
    copy = intrinsic(code.module, "llvm.memcpy.p0.p0.i64", VOID, [FLOATS, FLOATS, INT64, BIT])
    scrap = b.sext(b.load(first_page), INT64)
    begin = code.times(unit, TOGETHER)
    with code.loop(begin, code.smaller(b.add(begin, number(TOGETHER)), tokens)) as token:
        is_valid = b.icmp_signed("!=", b.load(code.at(valid, token.index)), number(0, BYTE))
        position = b.sext(b.load(code.at(positions, token.index)), INT64)
        position = b.select(is_valid, position, number(0))  # an invalid one may be anything
        column = b.add(b.mul(b.sdiv(token.index, queries), pages), b.sdiv(position, page_size))
        own = b.add(scrap, b.sext(b.load(code.at(table, column)), INT64))
        page = b.select(is_valid, own, scrap)
        offset = b.srem(position, page_size)
        for side, new in enumerate((k, v)):
            with code.loop(number(0), heads) as head:
                of_page = b.add(code.times(page, 2), number(side))
                row = b.add(b.mul(b.add(b.mul(of_page, heads), head.index), page_size), offset)
                source = code.at(new, b.mul(b.add(b.mul(token.index, heads), head.index), head_dim))
                size = code.times(head_dim, 4)
                b.call(copy, [code.at(data, b.mul(row, head_dim)), source, size, number(0, BIT)])
