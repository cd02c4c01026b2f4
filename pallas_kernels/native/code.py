"""A thin hand for writing LLVM IR: counted loops with carried values, vectors of float32, addresses in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

BIT, BYTE, INT32, INT64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOAT = ir.FloatType()
Value = Any  # llvmlite's, which has no types
ADDRESS, FLOATS = BYTE.as_pointer(), FLOAT.as_pointer()
VOID = ir.VoidType()


def number(value: int, kind: ir.Type = INT64) -> ir.Constant:
    return ir.Constant(kind, value)


def intrinsic(module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Function:
    """A function of LLVM's or of the C library, declared once."""
    known = module.globals.get(name)
    return known if known is not None else ir.Function(module, ir.FunctionType(result, arguments), name)


@dataclass
class Loop:
    """A running loop: its index, the carried values as they stand, and what they become for the next turn.  Once it has
    ended, `index` is the first one not run and `values` are the last ones."""

    index: Value
    values: list[Value]
    following: list[Value] = field(default_factory=list)


class Code:
    """Writes one function, block after block.  Vectors hold `lanes` float32."""

    def __init__(
        self, module: ir.Module, name: str, arguments: Sequence[ir.Type], *, lanes: int, result: ir.Type = VOID
    ):
        self.module = module
        self.lanes = lanes
        self.vector = ir.VectorType(FLOAT, lanes)
        self.function = ir.Function(module, ir.FunctionType(result, arguments), name)
        self.arguments: Sequence[Value] = self.function.args
        # llvmlite has no types, and pyright takes what its decorated methods return for None.
        self.build: Any = ir.IRBuilder(self.function.append_basic_block("entry"))

    def private(self) -> Code:
        """Seen by this module alone, and never inlined: a tile's registers are its own."""
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        return self

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1, values: Sequence[Value] = ()) -> Iterator[Loop]:
        """`for index in range(start, stop, step)`; set `following` when values are carried."""
        b = self.build
        before = b.block
        head, body, end = (b.append_basic_block(name) for name in ("head", "body", "end"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(INT64)
        index.add_incoming(start, before)
        carried = [b.phi(value.type) for value in values]
        for phi, value in zip(carried, values, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", index, stop), body, end)
        b.position_at_end(body)
        loop = Loop(index, list(carried))
        yield loop
        index.add_incoming(b.add(index, number(step)), b.block)
        for phi, value in zip(carried, loop.following, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(end)
        loop.values = list(carried)

    def at(self, base: Value, index: Value | int) -> Value:
        """The address of element `index`."""
        return self.build.gep(base, [number(index) if isinstance(index, int) else index])

    def times(self, value: Value, factor: int) -> Value:
        return self.build.mul(value, number(factor))

    def smaller(self, a: Value, b: Value) -> Value:
        return self.build.select(self.build.icmp_signed("<", a, b), a, b)

    def larger(self, a: Value, b: Value) -> Value:
        return self.build.select(self.build.icmp_signed(">", a, b), a, b)

    def floor(self, value: Value, unit: int) -> Value:
        """The last multiple of a power of two."""
        return self.build.and_(value, number(-unit))

    def rounded_up(self, value: Value, unit: Value | int) -> Value:
        """value / unit, rounded up."""
        unit = number(unit) if isinstance(unit, int) else unit
        return self.build.sdiv(self.build.add(value, self.build.sub(unit, number(1))), unit)

    def zeros(self) -> ir.Constant:
        return ir.Constant(self.vector, [0.0] * self.lanes)

    def load_vector(self, address: Value) -> Value:
        return self.build.load(self.build.bitcast(address, self.vector.as_pointer()), align=4)

    def store_vector(self, vector: Value, address: Value) -> None:
        self.build.store(vector, self.build.bitcast(address, self.vector.as_pointer()), align=4)

    def load_some(self, address: Value, present: Value) -> Value:
        """Only the lanes that are present are read; the others are zero."""
        kind = self.vector.as_pointer()
        function = intrinsic(
            self.module, f"llvm.masked.load.v{self.lanes}f32.p0", self.vector, [kind, INT32, present.type, self.vector]
        )
        given = [self.build.bitcast(address, kind), number(4, INT32), present, self.zeros()]
        return self.build.call(function, given)

    def store_some(self, vector: Value, address: Value, present: Value) -> None:
        kind = self.vector.as_pointer()
        name = f"llvm.masked.store.v{self.lanes}f32.p0"
        function = intrinsic(self.module, name, VOID, [self.vector, kind, INT32, present.type])
        self.build.call(function, [vector, self.build.bitcast(address, kind), number(4, INT32), present])

    def constant(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [value] * self.lanes)

    def splat(self, value: Value) -> Value:
        nothing = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        one = self.build.insert_element(nothing, value, number(0, INT32))
        return self.shuffle(one, nothing, [0] * self.lanes)

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """These lanes of a and b, b's counted behind a's."""
        return self.build.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))

    def maximum(self, a: Value, b: Value) -> Value:
        """b where one is NaN."""
        return self.build.select(self.build.fcmp_ordered(">", a, b), a, b)

    def reduced(self, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes combined, in every lane."""
        distance = self.lanes // 2
        while distance:
            vector = combine(vector, self.shuffle(vector, vector, [i ^ distance for i in range(self.lanes)]))
            distance //= 2
        return vector

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        kind = "f32" if a.type == FLOAT else f"v{self.lanes}f32"
        return self.build.call(intrinsic(self.module, f"llvm.fma.{kind}", a.type, [a.type] * 3), [a, b, c])

    def prefetch(self, address: Value) -> None:
        """Ask for a cache line that will be read soon, and once a step: it need not push others out of the last cache."""
        function = intrinsic(self.module, "llvm.prefetch.p0", VOID, [ADDRESS, INT32, INT32, INT32])
        kind = (number(0, INT32), number(0, INT32), number(1, INT32))  # a read, not kept, of data
        self.build.call(function, [self.build.bitcast(address, ADDRESS), *kind])

    def field(self, base: Value, offset: int, kind: ir.Type) -> Value:
        """What stands `offset` bytes into a struct."""
        return self.build.load(self.place(base, offset, kind))

    def set_field(self, base: Value, offset: int, value: Value) -> None:
        self.build.store(value, self.place(base, offset, value.type))

    def place(self, base: Value, offset: int, kind: ir.Type) -> Value:
        return self.build.bitcast(self.at(base, offset), kind.as_pointer())
