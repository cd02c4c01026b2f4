"""What a compiled program's text says: its collectives, and the large arrays it copies.

Reads the HLO that XLA prints after its last pass, of the TPU and of the CUDA compiler.  Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}  # else 1
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "int8": "s8"}  # XLA's names
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
# Results that are no new array: names for one that exists, or the whole of a loop that is written in place.
VIEWS = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "call-start", "call-done",
    "async-start", "async-update", "async-done", "optimization-barrier", "opt-barrier", "constant", "after-all",
    "custom-call", "scatter", "dynamic-update-slice",
}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][\w-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(body|condition|to_apply|calls)=%?([\w.-]+)|branch_computations=\{([^}]*)\}")
_PRECISION = re.compile(r'operand_precision"?[=:]([{\[][^}\]]*[}\]])')


@dataclass(frozen=True, slots=True)
class Array:
    """A result's dtype, dims and layout as the text has them."""

    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.dims) * BYTES.get(self.dtype, 1)

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def is_on_chip(self) -> bool:
        """In a TPU's vector memory: a load of it, not a second copy in HBM."""
        return "S(1)" in self.layout

    @property
    def has_narrow_tiles(self) -> bool:
        """On TPU: a register of 8 rows holds fewer of this array."""
        tile = re.search(r"T\((\d+),\d+\)", self.layout)
        return tile is not None and int(tile[1]) < 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]{self.layout}"


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    opcode: str
    results: tuple[Array, ...]
    called: tuple[tuple[str, str], ...]  # (how, computation)
    text: str


@dataclass(frozen=True, slots=True)
class Collective:
    kind: str  # "all-reduce"
    dtype: str
    nbytes: int  # of its result, on one device
    is_in_loop: bool  # in a loop over the layers: it runs once for each


@dataclass(frozen=True, slots=True)
class Program:
    """The computations of a program by name, and how each is reached."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    def reached(self) -> dict[str, bool]:
        """Computations whose instructions run as they stand (not inside a fusion) -> whether inside a loop."""
        found = {self.entry: False}
        waiting = [self.entry]
        while waiting:
            name = waiting.pop()
            for instruction in self.computations[name]:
                for how, called in instruction.called:
                    is_run = how in ("body", "condition", "branch") or instruction.opcode.startswith(("call", "async"))
                    if not is_run or called not in self.computations:
                        continue
                    is_in_loop = found[name] or (how == "body" and instruction.opcode == "while")
                    if called not in found or (is_in_loop and not found[called]):
                        found[called] = is_in_loop
                        waiting.append(called)
        return found

    def fused(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """What a fusion does, one by one."""
        if not instruction.opcode.startswith("fusion"):
            return ()
        bodies = [self.computations.get(name, ()) for how, name in instruction.called if how == "calls"]
        return tuple(each for body in bodies for each in body)

    def writes_in_place(self, instruction: Instruction) -> bool:
        """A fusion around a scatter or a slice update: its result is its operand, changed."""
        return any(each.opcode in ("scatter", "dynamic-update-slice") for each in self.fused(instruction))


def parse(text: str) -> Program:
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = head[2]
            computations[current] = []
            if head[1]:
                entry = current
        elif current and (found := _INSTRUCTION.match(line)):
            computations[current].append(_instruction(found[1], found[2]))
    if not entry:
        raise ValueError("the text holds no ENTRY computation: it is no compiled program")
    return Program(entry, {name: tuple(body) for name, body in computations.items()})


def _instruction(name: str, rest: str) -> Instruction:
    opcode = _OPCODE.search(re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", rest))
    head = rest[: rest.find(f" {opcode[1]}(")] if opcode else rest
    results = tuple(
        Array(dtype, tuple(int(dim) for dim in dims.split(",") if dim), layout or "")
        for dtype, dims, layout in _ARRAY.findall(head)
    )
    called = []
    for how, one, branches in _CALLED.findall(rest):
        called += [(how, one)] if one else [("branch", each.strip().lstrip("%")) for each in branches.split(",")]
    return Instruction(name, opcode[1] if opcode else "", results, tuple(called), rest)


def collectives(program: Program) -> tuple[Collective, ...]:
    """Every collective once, whether split into a start and an end or alone in a fusion (as jax 0.11's CUDA compiler has
    them)."""
    found = []
    for name, is_in_loop in program.reached().items():
        body = program.computations[name]
        for instruction in (*body, *(inner for each in body for inner in program.fused(each))):
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                # The start of a gather holds its operand and its result: the larger one is the result.
                results = instruction.results if kind == "all-reduce" else (_largest(instruction.results),)
                nbytes = sum(array.nbytes for array in results)
                found.append(Collective(kind, instruction.results[0].dtype, nbytes, is_in_loop))
    return tuple(found)


def _largest(arrays: Iterable[Array]) -> Array:
    return max(arrays, key=lambda array: array.nbytes)


def dots(program: Program) -> tuple[str, ...]:
    """The distinct products, inside fusions too: "f32[32,1024] highest,highest"; without a word, the device's default."""
    found = set()
    for body in program.computations.values():
        for instruction in body:
            is_library = instruction.opcode == "custom-call" and (
                "cublas" in instruction.text or "gemm" in instruction.text
            )
            if instruction.opcode in ("dot", "convolution") or is_library:
                array = instruction.results[0]
                precision = _PRECISION.search(instruction.text)
                words = re.findall(r"\w+", precision[1].lower()) if precision else ["default"]
                found.add(f"{array.dtype}[{','.join(map(str, array.dims))}] {','.join(words)}")
    return tuple(sorted(found))


def copies(program: Program, is_wanted: Callable[[Array], bool]) -> tuple[str, ...]:
    """Instructions that make a new array, of those wanted.  Writes in place make none."""
    found = []
    for name in program.reached():
        for instruction in program.computations[name]:
            if instruction.opcode in VIEWS or instruction.opcode.endswith("-done") or not instruction.results:
                continue
            array = instruction.results[0]
            if not is_wanted(array) or program.writes_in_place(instruction):
                continue
            found.append(f"{instruction.opcode} {instruction.name}: {array}")
    return tuple(found)
