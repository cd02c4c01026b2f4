"""x times a weight in panels, on the CPU's own vector unit (`pallas_kernels.native`).

A tile is MR rows by one panel, kept in registers over a chunk of the inputs.  While a chunk is multiplied the next one is
fetched from memory, a few cache lines between the products: the weight is read once, straight through, and the reading
costs next to nothing beside 32 rows' arithmetic.  XLA's own products read first and multiply then.

Every output is the sum over chunks of sums in the order of the inputs, whatever the rows: the same bits in any batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from llvmlite import ir

from pallas_kernels.native.code import BIT, FLOATS, INT32, INT64, Code, number
from pallas_kernels.native.ffi import Buffer, handler
from pallas_kernels.native.host import host, register, threads
from pallas_kernels.registry import custom_call

NAME = "jaxserve_panel_matmul"
CHUNK = 192  # inputs a tile goes over at once: a chunk of a panel stays in the nearest cache
VECTORS = 3  # of a panel's row
UNROLL = 4
AHEAD = 16  # rows of the panel, when too few rows are multiplied to fetch between them
UNITS_A_THREAD = 4  # neighbouring panels go together; enough units that no thread waits long for another


def panel_width() -> int:
    """Outputs a panel holds on this CPU."""
    return VECTORS * host().lanes


def panel_matmul(x: Array, panels: Array, layer: Array, *, outputs: int) -> Array:
    """x [M, I], panels [L, P, I, W] -> [M, outputs].  See the package's `panel_matmul`."""
    call = jax.ffi.ffi_call(_ready(), jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32))
    return call(x, panels, layer.reshape(1))


@custom_call
def _ready() -> str:
    module = ir.Module(NAME)
    tiles = _Tiles(module)
    handler(module, NAME, _prepare, functools.partial(_group, tiles), lanes=host().lanes)
    register(module, NAME)
    return NAME


def _prepare(code: Code, argument: Callable[[int], Buffer], result: Buffer) -> tuple[ir.Value, Sequence[ir.Value]]:
    x, panels = argument(0), argument(1)
    b, count = code.build, panels.dim(1)
    layer = b.sext(b.load(b.inttoptr(argument(2).data(), INT32.as_pointer())), INT64)
    layer_size = code.times(b.mul(count, b.mul(panels.dim(2), panels.dim(3))), 4)
    together = code.rounded_up(count, UNITS_A_THREAD * threads())
    words = (
        x.data(),
        b.add(panels.data(), b.mul(layer, layer_size)),
        result.data(),
        x.dim(0),
        x.dim(1),
        result.dim(1),
        count,
        together,
    )
    return code.rounded_up(count, together), words


class _Tiles:
    """tile(x, panel, out, I, O, inputs, ahead, first, columns): the products of `rows` rows over one chunk."""

    ARGUMENTS = (FLOATS, FLOATS, FLOATS, INT64, INT64, INT64, FLOATS, BIT, INT64)

    def __init__(self, module: ir.Module):
        self.module = module
        self.rows = 8 if host().registers == 32 else 4  # with VECTORS, as many sums as registers hold
        self._made: dict[tuple[int, int, bool], ir.Function] = {}

    def sizes(self) -> list[int]:
        """Rows of a tile, the largest first."""
        return [self.rows >> i for i in range(self.rows.bit_length())]

    def get(self, rows: int, fetched: int, is_cut: bool) -> ir.Function:
        """fetched: rows of `ahead` asked for at every UNROLL inputs.  is_cut: only `columns` of the panel are there."""
        key = (rows, fetched, is_cut)
        if key not in self._made:
            self._made[key] = self._write(*key)
        return self._made[key]

    def _write(self, rows: int, fetched: int, is_cut: bool) -> ir.Function:
        name = f"tile_{rows}_{fetched}{'_cut' if is_cut else ''}"
        code = Code(self.module, name, self.ARGUMENTS, lanes=host().lanes).private()
        x, panel, out, row_stride, out_stride, inputs, ahead, first, columns = code.arguments
        b, lanes, width = code.build, code.lanes, VECTORS * code.lanes
        x_rows = [code.at(x, code.times(row_stride, i)) for i in range(rows)]

        def multiply(index: ir.Value, panel_row: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            weights = [code.load_vector(code.at(panel_row, j * lanes)) for j in range(VECTORS)]
            values = [code.splat(b.load(code.at(row, index))) for row in x_rows]
            products = [(value, weight) for value in values for weight in weights]
            return [code.fma(value, weight, so_far) for (value, weight), so_far in zip(products, sums, strict=True)]

        whole = b.and_(inputs, number(~(UNROLL - 1)))
        with code.loop(number(0), whole, UNROLL, [panel, ahead, *[code.zeros()] * (rows * VECTORS)]) as loop:
            panel_row, fetch, *sums = loop.values
            for i in range(UNROLL):
                if i < fetched:
                    for j in range(VECTORS):
                        code.prefetch(code.at(fetch, j * lanes))
                    fetch = code.at(fetch, width)
                sums = multiply(b.add(loop.index, number(i)), panel_row, sums)
                panel_row = code.at(panel_row, width)
            loop.following = [panel_row, fetch, *sums]
        panel_row, _, *sums = loop.values
        with code.loop(whole, inputs, 1, [panel_row, *sums]) as loop:
            panel_row, *sums = loop.values
            loop.following = [code.at(panel_row, width), *multiply(loop.index, panel_row, sums)]
        _, *sums = loop.values
        out_rows = [code.at(out, code.times(out_stride, i)) for i in range(rows)]
        if is_cut:
            self._store_cut(code, sums, out_rows, first, columns)
        else:
            for i, total in enumerate(sums):
                place = code.at(out_rows[i // VECTORS], i % VECTORS * lanes)
                code.store_vector(b.select(first, total, b.fadd(code.load_vector(place), total)), place)
        b.ret_void()
        return code.function

    @staticmethod
    def _store_cut(
        code: Code, sums: list[ir.Value], out_rows: list[ir.Value], first: ir.Value, columns: ir.Value
    ) -> None:
        b = code.build
        with b.goto_entry_block():
            space = b.bitcast(b.alloca(code.vector, size=len(sums)), FLOATS)
        for i, total in enumerate(sums):
            code.store_vector(total, code.at(space, i * code.lanes))
        for i, row in enumerate(out_rows):
            with code.loop(number(0), columns) as column:
                total = b.load(code.at(space, b.add(number(i * VECTORS * code.lanes), column.index)))
                place = code.at(row, column.index)
                b.store(b.select(first, total, b.fadd(b.load(place), total)), place)


def _group(tiles: _Tiles, code: Code, words: Sequence[ir.Value], unit: ir.Value) -> None:
    """All rows times a few neighbouring panels."""
    b, width = code.build, VECTORS * code.lanes
    x, panels, out = (b.inttoptr(word, FLOATS) for word in words[:3])
    rows, inputs, outputs, count, together = words[3:8]
    begin = b.mul(unit, together)
    blocks = b.sdiv(rows, number(tiles.rows))
    with code.loop(begin, code.smaller(b.add(begin, together), count)) as panel:
        column = code.times(panel.index, width)
        columns = code.smaller(number(width), b.sub(outputs, column))
        is_cut = b.icmp_signed("<", columns, number(width))
        panel_at = code.at(panels, b.mul(panel.index, code.times(inputs, width)))
        out_at = code.at(out, column)
        with code.loop(number(0), inputs, CHUNK) as chunk:
            length = code.smaller(number(CHUNK), b.sub(inputs, chunk.index))
            first = b.icmp_signed("==", chunk.index, number(0))
            x_at, chunk_at = code.at(x, chunk.index), code.at(panel_at, code.times(chunk.index, width))
            following = code.at(chunk_at, code.times(length, width))  # the next chunk, or the next panel's first

            def multiply(size: int, fetched: int, row: ir.Value, ahead: ir.Value) -> None:
                given = [
                    code.at(x_at, b.mul(row, inputs)), chunk_at, code.at(out_at, b.mul(row, outputs)),
                    inputs, outputs, length, ahead, first, columns,
                ]  # fmt: skip
                with b.if_else(is_cut) as (cut, whole):
                    with cut:
                        b.call(tiles.get(size, fetched, True), given)
                    with whole:
                        b.call(tiles.get(size, fetched, False), given)

            with code.loop(number(0), blocks) as block:
                # Blocks share the fetching: one alone fetches 4 rows of the next chunk for 4 inputs, two or three 2
                # each, the first four of more 1 each.
                row = code.times(block.index, tiles.rows)
                quarter = code.times(code.rounded_up(length, 4), width)
                cases = [(number(1), 4), (number(3), 2)]

                def from_case(index: int) -> None:
                    if index == len(cases):
                        with b.if_else(b.icmp_signed("<", block.index, number(4))) as (early, late):
                            with early:
                                multiply(tiles.rows, 1, row, code.at(following, b.mul(block.index, quarter)))
                            with late:
                                multiply(tiles.rows, 0, row, following)
                        return
                    most, fetched = cases[index]
                    with b.if_else(b.icmp_signed("<=", blocks, most)) as (this, others):
                        with this:
                            start = b.mul(block.index, code.times(quarter, fetched))
                            multiply(tiles.rows, fetched, row, code.at(following, start))
                        with others:
                            from_case(index + 1)

                from_case(0)
            row = code.times(blocks, tiles.rows)
            for size in tiles.sizes()[1:]:
                with code.loop(row, b.sub(rows, number(size - 1)), size) as few:
                    multiply(size, UNROLL, few.index, code.at(chunk_at, AHEAD * width))
                row = few.index
