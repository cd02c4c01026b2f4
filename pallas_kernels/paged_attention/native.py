"""Paged attention on the CPU's own vector unit (`pallas_kernels.native`).

A decode step is bound by memory: so every key and every value is read once, where it lies in the pool, for all queries
that need it, and what is read next is asked for while the last is computed with.  A prefill's queries go in blocks of
LINES.

A kv head's lines (its queries x G) go over the row's positions in groups of GROUP under a running softmax.  A group's
keys come first, in blocks of as many as a register has lanes: each position's products are summed over the head dim in a
register of its own, and a tree of shuffles and adds turns these into one register with a score for each position.  Then
every line's weights, then the values.  Tiles of a few lines share what is loaded.

Groups stand at absolute positions, and a position that a line does not see adds exactly nothing to it.  So the bits of a
query depend on nothing but its row up to its own position: not on its mates, the page size, a chunk's border, or how
many drafts are verified with it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from llvmlite import ir

from pallas_kernels.native.code import BIT, FLOAT, FLOATS, INT32, INT64, Code, number
from pallas_kernels.native.ffi import Buffer, handler
from pallas_kernels.native.host import host, register, threads
from pallas_kernels.registry import custom_call

LINES = 128  # of a kv head at once: what a row has more is a block of its own, and reads the keys and values again
GROUP = 64  # positions between two updates of the running softmax
LOWEST = -1e30  # a score never reached; finite, so that the difference of two is 0 and not NaN
LEAST_POWER = -126.0  # of two, that a float32 holds
CACHE_LINE = 16  # float32
AHEAD = 16 * 1024  # bytes that are asked for before they are read
BLOCKS_A_THREAD = 8  # from then on a block's heads go together, and none begins with what nobody asked for
INTS = INT32.as_pointer()

# 2 ** x - 1 = x * (...) for |x| <= 1/2, to 2e-9
POWER_OF_TWO = (0.69314718, 0.24022648, 0.055503324, 0.009618438, 0.0013398879, 0.00015353357)
# tanh(x) = x * p(x * x) / q(x * x), to 4e-7 of it; beyond TANH_END it is 1 (Eigen's approximation, which XLA uses too)
TANH_P = (
    4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08, -8.60467152213735e-11,
    2.00018790482477e-13, -2.76076847742355e-16,
)  # fmt: skip
TANH_Q = (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)
TANH_END = 7.90531110763549805


def paged_attention(
    q: Array,
    data: Array,
    scale: Array | None,
    layer: Array,
    page_table: Array,
    kv_len: Array,
    q_len: Array,
    *,
    num_pages: int,
    scale_factor: float,
    window: Array,
    softcap: float,
) -> Array:
    """q: [R, Q, N, H] -> [R, Q, N, H].  See the package's `paged_attention`.

    Serves float32 pools and queries alone; ValueError for others."""
    if scale is not None or data.dtype != jnp.float32 or q.dtype != jnp.float32:
        raise ValueError(f"serves float32 pools and queries alone, got {data.dtype} and {q.dtype}")
    _, queries, heads, head_dim = q.shape
    kv_heads, page_size = data.shape[2:4]
    group = heads // kv_heads
    at_once = queries if queries * group <= LINES else max(1, LINES // group)
    plan = _Plan(at_once, group, kv_heads, head_dim, page_size, softcap > 0, host().lanes, host().registers)
    log2_e = math.log2(math.e)  # the softmax counts in powers of two
    factors = (scale_factor / softcap, softcap * log2_e) if softcap else (scale_factor * log2_e, 1.0)
    return jax.ffi.ffi_call(_ready(plan), jax.ShapeDtypeStruct(q.shape, q.dtype))(
        q, data, page_table, kv_len, q_len, layer.reshape(1), window.reshape(1), np.array([num_pages], np.int32),
        np.array(factors, np.float32),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a kernel knows when it is compiled."""

    queries: int  # of a row that go together
    group: int  # G = N / K
    kv_heads: int  # K
    head_dim: int  # H
    page_size: int  # T
    has_softcap: bool
    lanes: int
    registers: int

    @property
    def name(self) -> str:
        numbers = (self.queries, self.group, self.kv_heads, self.head_dim, self.page_size, self.lanes, self.registers)
        return "_".join(["jaxserve_paged_attention", *map(str, numbers), *["softcap"] * self.has_softcap])

    @property
    def vectors(self) -> int:
        """Registers of a head."""
        return -(-self.head_dim // self.lanes)

    @property
    def padded(self) -> int:
        """Floats of a head in scratch memory."""
        return self.vectors * self.lanes

    @property
    def sums(self) -> int:
        """Registers that a tile may sum in; the others hold what it loads."""
        return self.registers * 3 // 4

    @property
    def tile(self) -> int:
        """Lines that share what is loaded: as many as registers hold, and few empty ones in the last tile."""
        lines = self.queries * self.group
        return min(range(1, self.registers // 5 + 1), key=lambda size: (-(-lines // size) * (size + 1), -size))

    @property
    def ahead(self) -> int:
        """Blocks that are fetched before they are read."""
        return max(1, AHEAD // (4 * self.lanes * self.head_dim))

    @property
    def lines(self) -> int:
        """A head's, in whole tiles."""
        return -(-self.queries * self.group // self.tile) * self.tile


class _Cursor(NamedTuple):
    """Which block is fetched next: the places of four numbers."""

    head: ir.Value
    side: ir.Value  # 0 = keys, 1 = values
    group: ir.Value  # its first position
    position: ir.Value


@custom_call
def _ready(plan: _Plan) -> str:
    module = ir.Module(plan.name)
    attend = _Attend(module, plan).function
    handler(
        module, plan.name, functools.partial(_prepare, plan), functools.partial(_unit, plan, attend), lanes=plan.lanes
    )
    register(module, plan.name)
    return plan.name


def _prepare(
    plan: _Plan, code: Code, argument: Callable[[int], Buffer], result: Buffer
) -> tuple[ir.Value, Sequence[ir.Value]]:
    b = code.build
    q, data, table, kv_len, q_len, layer, window, num_pages, factors = map(argument, range(9))
    layer_at, window_at, pages_at = (
        code.field(b.inttoptr(scalar.data(), INTS), 0, INT32) for scalar in (layer, window, num_pages)
    )
    first_page = b.mul(b.sext(layer_at, INT64), b.sext(pages_at, INT64))
    pool = b.add(data.data(), b.mul(first_page, code.times(b.mul(data.dim(2), b.mul(data.dim(3), data.dim(4))), 8)))
    kv_heads = data.dim(2)
    blocks = b.mul(q.dim(0), code.rounded_up(q.dim(1), plan.queries))
    together = b.select(b.icmp_signed("<", blocks, number(BLOCKS_A_THREAD * threads())), number(1), kv_heads)
    units = b.mul(blocks, b.sdiv(kv_heads, together))
    words = (
        q.data(), pool, table.data(), kv_len.data(), q_len.data(), result.data(), factors.data(),
        b.sext(window_at, INT64), table.dim(1), together, q.dim(1),
    )  # fmt: skip
    return units, words


def _unit(plan: _Plan, attend: ir.Function, code: Code, words: Sequence[ir.Value], unit: ir.Value) -> None:
    """A block of a row's queries, with one kv head or all of them."""
    b = code.build
    q, pool, out, factors = (b.inttoptr(words[i], FLOATS) for i in (0, 1, 5, 6))
    table, kv_lens, q_lens = (b.inttoptr(words[i], INTS) for i in (2, 3, 4))
    window, columns, together, all_queries = words[7:11]
    head_units = b.sdiv(number(plan.kv_heads), together)
    blocks = code.rounded_up(all_queries, plan.queries)
    first_head = b.mul(b.urem(unit, head_units), together)
    block = b.udiv(unit, head_units)
    row = b.udiv(block, blocks)
    # The last block sees the most, so it goes first.
    first = code.times(b.sub(b.sub(blocks, number(1)), b.urem(block, blocks)), plan.queries)
    kv_len, q_len = (b.sext(b.load(code.at(lengths, row)), INT64) for lengths in (kv_lens, q_lens))
    q_len = b.select(b.icmp_signed(">", kv_len, number(0)), q_len, number(0))
    place = code.times(b.add(b.mul(row, all_queries), first), plan.kv_heads * plan.group * plan.head_dim)
    given = [
        code.at(q, place), pool, code.at(table, b.mul(row, columns)), columns, b.add(b.sub(kv_len, q_len), first),
        b.sub(q_len, first), b.sub(all_queries, first), window, factors, code.at(out, place), first_head,
        b.add(first_head, together),
    ]  # fmt: skip
    b.call(attend, given)


class _Attend:
    """attend(q, pool, table, columns, start, queries, places, window, factors, out, first_head, end_head): some queries
    of a row with some kv heads.

    q, out: the first query's.  pool: the layer's first page.  table: the row's.  start: the first query's position.
    From that query on, `queries` are there (none if <= 0) and q and out have `places`."""

    ARGUMENTS = (FLOATS, FLOATS, INTS, INT64, INT64, INT64, INT64, INT64, FLOATS, FLOATS, INT64, INT64)

    def __init__(self, module: ir.Module, plan: _Plan):
        self.plan = plan
        self.code = code = Code(module, "attend", self.ARGUMENTS, lanes=plan.lanes).private()
        self.function = code.function
        b = code.build
        q, self.pool, self.table, columns, self.start, queries, places, window, *rest = code.arguments
        factors, out, first_head, self.end_head = rest
        self.packed, self.scores, self.out, self.top, self.total = (
            b.bitcast(b.alloca(code.vector, size=-(-size // plan.lanes)), FLOATS)
            for size in (
                plan.lines * plan.padded, plan.lines * GROUP, plan.lines * plan.padded, plan.lines, plan.lines,
            )
        )  # fmt: skip
        self.factors = [code.splat(b.load(code.at(factors, i))) for i in range(2)]
        queries = code.larger(number(0), code.smaller(queries, number(plan.queries)))
        self.lines = code.times(queries, plan.group)
        self.places = code.times(code.smaller(places, number(plan.queries)), plan.group)
        exist = b.icmp_signed(">", queries, number(0))
        seen = code.smaller(b.add(self.start, queries), code.times(columns, plan.page_size))
        self.end = b.select(exist, seen, number(0))
        # A window of 0 reaches back to the beginning.
        self.reach = b.select(b.icmp_signed(">", window, number(0)), window, number(1 << 40))
        self.begin = code.larger(number(0), b.add(b.sub(self.start, self.reach), number(1)))
        self.first_block = code.floor(self.begin, plan.lanes)
        self.cursor = _Cursor(*(b.alloca(INT64) for _ in range(4)))
        with b.if_then(b.icmp_signed("<", self.begin, self.end)):
            for place, value in zip(
                self.cursor, (first_head, number(0), code.floor(self.begin, GROUP), self.first_block), strict=True
            ):
                b.store(value, place)
            with code.loop(number(0), number(plan.ahead)):
                self._prefetch(self._next_block())
        with code.loop(first_head, self.end_head) as head:
            self.head = head.index
            at = code.times(head.index, plan.group * plan.head_dim)
            self._pack(code.at(q, at))
            with code.loop(code.floor(self.begin, GROUP), self.end, GROUP) as group:
                self._group(group.index)
            self._finish(code.at(out, at))
        b.ret_void()

    def _group(self, first: ir.Value) -> None:
        code, lanes = self.code, self.plan.lanes
        start = code.larger(first, self.begin)
        end = code.smaller(code.build.add(first, number(GROUP)), self.end)
        first_block = code.floor(start, lanes)
        with code.loop(first_block, end, lanes) as block:
            self._keys(first, block.index)
        with code.loop(number(0), self.lines) as line:
            self._weights(line.index, first, first_block, end)
        with code.loop(first_block, end, lanes) as block:
            self._values(first, block.index, start, end)

    def _next_block(self) -> ir.Value:
        """The address of the cursor's block; the cursor goes on to the one that is read after it."""
        code, b, plan = self.code, self.code.build, self.plan
        head, side, group, at = (b.load(place) for place in self.cursor)
        has_ended = b.icmp_signed(">=", head, self.end_head)
        address = b.select(has_ended, self.packed, self._block_at(head, side, at))
        following = b.add(at, number(plan.lanes))
        side_ends = b.icmp_signed(">=", following, code.smaller(b.add(group, number(GROUP)), self.end))
        group_ends = b.and_(side_ends, b.icmp_signed("==", side, number(1)))
        group = b.select(group_ends, b.add(group, number(GROUP)), group)
        head_ends = b.icmp_signed(">=", group, self.end)
        group = b.select(head_ends, code.floor(self.begin, GROUP), group)
        moved = (
            b.select(head_ends, b.add(head, number(1)), head),
            b.select(side_ends, b.sub(number(1), side), side),
            group,
            b.select(side_ends, code.larger(group, self.first_block), following),
        )
        for value, place in zip(moved, self.cursor, strict=True):
            b.store(value, place)
        return address

    def _pack(self, q: ir.Value) -> None:
        """The lines behind each other, in whole registers, and an empty softmax."""
        code, b, plan = self.code, self.code.build, self.plan

        def put(line: ir.Value, source: ir.Value | None) -> None:
            place = code.times(line, plan.padded)
            for column in range(0, plan.padded, plan.lanes):
                vector = code.zeros() if source is None else self._load(code.at(source, column), column)
                code.store_vector(vector, code.at(self.packed, b.add(place, number(column))))
                code.store_vector(code.zeros(), code.at(self.out, b.add(place, number(column))))
            b.store(ir.Constant(FLOAT, LOWEST), code.at(self.top, line))
            b.store(ir.Constant(FLOAT, 0.0), code.at(self.total, line))

        with code.loop(number(0), self.lines) as line:
            put(line.index, code.at(q, self._place(line.index)))
        with code.loop(self.lines, number(plan.lines)) as line:
            put(line.index, None)

    def _finish(self, out: ir.Value) -> None:
        """The lines' results; zeros for those without a query."""
        code, b, plan = self.code, self.code.build, self.plan
        with code.loop(number(0), self.places) as line:
            exists = b.icmp_signed("<", line.index, self.lines)
            total = code.splat(b.load(code.at(self.total, line.index)))
            source = code.at(self.out, code.times(line.index, plan.padded))
            place = code.at(out, self._place(line.index))
            for column in range(0, plan.padded, plan.lanes):
                value = b.fdiv(code.load_vector(code.at(source, column)), total)
                self._store(b.select(exists, value, code.zeros()), code.at(place, column), column)

    def _keys(self, first: ir.Value, position: ir.Value) -> None:
        """Scores of every line and a register's positions."""
        code, b, plan = self.code, self.code.build, self.plan
        keys, ahead = self._block_at(self.head, number(0), position), self._next_block()
        whole = plan.head_dim // plan.lanes * plan.lanes
        at_once = 1 << int(math.log2(min(plan.lanes, max(1, plan.sums // plan.tile))))
        with code.loop(number(0), self.lines, plan.tile) as tile:
            queries = code.at(self.packed, code.times(tile.index, plan.padded))
            scores = code.at(self.scores, b.add(code.times(tile.index, GROUP), b.sub(position, first)))
            fetch = b.select(b.icmp_signed("==", tile.index, number(0)), ahead, keys)
            sums: list[list[ir.Value]] = [[] for _ in range(plan.tile)]
            for begin in range(0, plan.lanes, at_once):

                def multiply(column: ir.Value, so_far: Sequence[ir.Value], tail: int, begin: int = begin):
                    lines = [
                        code.load_vector(code.at(queries, b.add(column, number(i * plan.padded))))
                        for i in range(plan.tile)
                    ]
                    products = []
                    for j in range(at_once):
                        offset = b.add(column, number((begin + j) * plan.head_dim))
                        code.prefetch(code.at(fetch, offset))
                        key = self._load(code.at(keys, offset), tail)
                        products += [(key, line) for line in lines]
                    return [code.fma(key, line, total) for (key, line), total in zip(products, so_far, strict=True)]

                with code.loop(number(0), number(whole), plan.lanes, [code.zeros()] * (at_once * plan.tile)) as column:
                    column.following = multiply(column.index, column.values, 0)
                part = column.values
                if whole < plan.head_dim:
                    part = multiply(number(whole), part, whole)
                for i in range(plan.tile):
                    sums[i].append(self._transposed_sum(part[i :: plan.tile], 0))
            for i, parts in enumerate(sums):
                total = self._transposed_sum(parts, int(math.log2(at_once)))
                code.store_vector(total, code.at(scores, i * GROUP))

    def _transposed_sum(self, vectors: list[ir.Value], level: int) -> ir.Value:
        """Vectors of one position each (level 0), or of 2 ** level positions, to one of all of them: its lane i is the
        sum of vector i's lanes."""
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self._paired_sum(left, right, level) for left, right in pairs]
            level += 1
        return vectors[0]

    def _paired_sum(self, left: ir.Value, right: ir.Value, level: int) -> ir.Value:
        """Shuffles that stay within 4 lanes are the fastest, so the first two levels do."""
        lanes = self.plan.lanes
        quads = range(0, lanes, 4)
        if level == 0:
            halves = [
                [quad + i + other for quad in quads for i in two for other in (0, lanes)] for two in ((0, 1), (2, 3))
            ]
        elif level == 1:
            halves = [
                [quad + i + other for quad in quads for other in (0, lanes) for i in two] for two in ((0, 1), (2, 3))
            ]
        else:
            halves = [[quad + i for quad in range(4 * odd, 2 * lanes, 8) for i in range(4)] for odd in (0, 1)]
        return self.code.build.fadd(*(self.code.shuffle(left, right, half) for half in halves))

    def _weights(self, line: ir.Value, first: ir.Value, start: ir.Value, end: ir.Value) -> None:
        """A line's scores become its weights, and its softmax goes on."""
        code, b, plan = self.code, self.code.build, self.plan
        scores = code.at(self.scores, b.sub(code.times(line, GROUP), first))
        last = b.add(self.start, b.sdiv(line, number(plan.group)))
        before = b.sub(last, self.reach)
        steps = ir.Constant(ir.VectorType(INT32, plan.lanes), list(range(plan.lanes)))

        def steps_to(position: ir.Value, block: ir.Value) -> ir.Value:
            """From a block's first position, in every lane."""
            steps = code.larger(b.sub(position, block), number(-(1 << 30)))  # what 32 bits hold
            return code.splat(b.trunc(steps, INT32))

        with code.loop(start, end, plan.lanes, [code.constant(LOWEST)]) as block:
            score = b.fmul(code.load_vector(code.at(scores, block.index)), self.factors[0])
            if plan.has_softcap:
                score = b.fmul(_tanh(code, score), self.factors[1])
            sees = b.and_(
                b.icmp_signed("<=", steps, steps_to(last, block.index)),
                b.icmp_signed(">", steps, steps_to(before, block.index)),
            )
            score = b.select(sees, score, code.constant(LOWEST))
            code.store_vector(score, code.at(scores, block.index))
            block.following = [code.maximum(score, block.values[0])]
        top_at, total_at = code.at(self.top, line), code.at(self.total, line)
        old_top = code.splat(b.load(top_at))
        top = code.reduced(code.maximum(old_top, block.values[0]), code.maximum)
        keep = _power_of_two(code, b.fsub(old_top, top))
        with code.loop(start, end, plan.lanes, [code.zeros()]) as block:
            score = code.load_vector(code.at(scores, block.index))
            # NaN is seen: it must come out.
            sees = b.fcmp_unordered(">", score, code.constant(LOWEST / 2))
            weight = b.select(sees, _power_of_two(code, b.fsub(score, top)), code.zeros())
            code.store_vector(weight, code.at(scores, block.index))
            block.following = [b.fadd(block.values[0], weight)]
        sums = code.reduced(block.values[0], b.fadd)
        lane = number(0, INT32)
        total = code.fma(b.load(total_at), b.extract_element(keep, lane), b.extract_element(sums, lane))
        b.store(total, total_at)
        b.store(b.extract_element(top, lane), top_at)
        place = code.at(self.out, code.times(line, plan.padded))
        for column in range(0, plan.padded, plan.lanes):
            code.store_vector(b.fmul(code.load_vector(code.at(place, column)), keep), code.at(place, column))

    def _values(self, first: ir.Value, position: ir.Value, start: ir.Value, end: ir.Value) -> None:
        """Adds a register's positions, weighted, to every line.  Never reads those that nobody sees: 0 * NaN is NaN."""
        code, b, plan = self.code, self.code.build, self.plan
        values, ahead = self._block_at(self.head, number(1), position), self._next_block()
        start = b.sub(code.larger(start, position), position)
        end = code.smaller(b.sub(end, position), number(plan.lanes))
        with b.if_then(b.icmp_signed("<", b.sub(end, start), number(plan.lanes))):
            self._prefetch(ahead)  # the loop below is too short to do it
        most = max(1, plan.sums // plan.tile)
        chunk = -(-plan.vectors // -(-plan.vectors // most))
        with code.loop(number(0), self.lines, plan.tile) as tile:
            out = code.at(self.out, code.times(tile.index, plan.padded))
            weights = code.at(self.scores, b.add(code.times(tile.index, GROUP), b.sub(position, first)))
            fetch = b.select(b.icmp_signed("==", tile.index, number(0)), ahead, values)
            for begin in range(0, plan.vectors, chunk):
                columns = [i * plan.lanes for i in range(begin, min(begin + chunk, plan.vectors))]
                places = [code.at(out, i * plan.padded + column) for i in range(plan.tile) for column in columns]
                with code.loop(start, end, 1, [code.load_vector(place) for place in places]) as at:
                    row = code.times(at.index, plan.head_dim)
                    for column in columns:
                        code.prefetch(code.at(fetch, b.add(row, number(column))))
                    loaded = [self._load(code.at(values, b.add(row, number(column))), column) for column in columns]
                    weight = [
                        code.splat(b.load(code.at(weights, b.add(at.index, number(i * GROUP)))))
                        for i in range(plan.tile)
                    ]
                    products = [(one, value) for one in weight for value in loaded]
                    at.following = [
                        code.fma(one, value, so_far) for (one, value), so_far in zip(products, at.values, strict=True)
                    ]
                for total, place in zip(at.values, places, strict=True):
                    code.store_vector(total, place)

    def _block_at(self, head: ir.Value, side: ir.Value, position: ir.Value) -> ir.Value:
        """Where a head's key (side 0) or value of a position lies."""
        code, b, plan = self.code, self.code.build, self.plan
        page = b.sext(b.load(code.at(self.table, b.udiv(position, number(plan.page_size)))), INT64)
        heads = b.add(code.times(b.add(code.times(page, 2), side), plan.kv_heads), head)
        positions = b.add(code.times(heads, plan.page_size), b.urem(position, number(plan.page_size)))
        return code.at(self.pool, code.times(positions, plan.head_dim))

    def _prefetch(self, address: ir.Value) -> None:
        """As many positions as a register has lanes."""
        for i in range(0, self.plan.lanes * self.plan.head_dim, CACHE_LINE):
            self.code.prefetch(self.code.at(address, i))

    def _place(self, line: ir.Value) -> ir.Value:
        """Of a line in q and out, from the head's first."""
        code, b, plan = self.code, self.code.build, self.plan
        query, one = b.udiv(line, number(plan.group)), b.urem(line, number(plan.group))
        return code.times(b.add(code.times(query, plan.kv_heads * plan.group), one), plan.head_dim)

    # Vectors.

    def _present(self, column: int) -> ir.Constant | None:
        """Which lanes from `column` on are of the head; None = all."""
        count = self.plan.head_dim - column
        if count >= self.plan.lanes:
            return None
        return ir.Constant(ir.VectorType(BIT, self.plan.lanes), [int(i < count) for i in range(self.plan.lanes)])

    def _load(self, address: ir.Value, column: int) -> ir.Value:
        present = self._present(column)
        return self.code.load_vector(address) if present is None else self.code.load_some(address, present)

    def _store(self, vector: ir.Value, address: ir.Value, column: int) -> None:
        present = self._present(column)
        if present is None:
            self.code.store_vector(vector, address)
        else:
            self.code.store_some(vector, address, present)


def _polynomial(code: Code, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    total = code.constant(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = code.fma(total, x, code.constant(coefficient))
    return total


def _power_of_two(code: Code, x: ir.Value) -> ir.Value:
    """2 ** x for x <= 0, at least 2 ** LEAST_POWER."""
    b, least, to_integer = code.build, code.constant(LEAST_POWER), code.constant(1.5 * 2**23)
    ints = ir.VectorType(INT32, code.lanes)
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    shifted = b.fadd(x, to_integer)  # its lowest bits are the nearest integer
    power = _polynomial(code, b.fsub(x, b.fsub(shifted, to_integer)), (1.0, *POWER_OF_TWO))
    exponent = b.shl(b.bitcast(shifted, ints), ir.Constant(ints, [23] * code.lanes))
    return b.bitcast(b.add(b.bitcast(power, ints), exponent), code.vector)


def _tanh(code: Code, x: ir.Value) -> ir.Value:
    b, end, other_end = code.build, code.constant(TANH_END), code.constant(-TANH_END)
    x = b.select(b.fcmp_ordered(">", x, end), end, x)
    x = b.select(b.fcmp_ordered("<", x, other_end), other_end, x)
    square = b.fmul(x, x)
    return b.fdiv(b.fmul(x, _polynomial(code, square, TANH_P)), _polynomial(code, square, TANH_Q))
