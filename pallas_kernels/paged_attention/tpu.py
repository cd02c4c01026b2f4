"""Paged attention for TPU (Pallas, Mosaic): one call that reads the pool where it lies.

A *tile* is some queries of one row with all their heads; tiles are the grid.  A tile visits *blocks*: `pages_per_block`
pages' worth of positions, at absolute borders, from the first position any of its queries sees to the last.  Only pages
with a seen position are fetched, each by one DMA for its keys and values of all kv heads.

All blocks of all tiles, in order, are one stream (`_PageStream`).  It runs BUFFERS - 1 blocks ahead of the arithmetic
and does not stop at a tile's end, so the first blocks of the next tile are under way while this one's last are computed.
The page table stays in HBM too (256 rows of 2,048 pages overflow SMEM): a tile's row of it is fetched while the tile
before is.

Query heads that share a kv head are rows of one matmul: M = queries_per_block * N / K rows, rounded up to 8.

Technique: FlashAttention-2 (arXiv 2307.08691) for the running softmax; ragged paged attention (arXiv 2604.15464) for
pages fetched by hand across grid steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
BUFFERS = 3  # blocks in VMEM: one in use, two on their way
MASKED, LOWEST = -1e38, -1e30  # exp(MASKED - LOWEST) is 0: a masked score has no weight even when no score is seen
UNLIMITED = 1 << 30  # positions

Ref = Array  # what a kernel gets: memory that is indexed, assigned and sliced with `.at` like an array

MIB = 1 << 20
VMEM_LIMIT = 48 * MIB  # of 64 (7x) or 128 (v5e, v6e); a call claims what it needs, the rest stays XLA's
STACK_BYTES = 6 * MIB  # for what the compiler keeps beside the arrays counted in `_vmem_bytes`
BLOCK_BYTES = 2 * MIB  # two such blocks under way hide a DMA's latency at an HBM's full speed
TILE_ROWS = 512  # matmul rows of a prefill tile: enough arithmetic for each byte of keys and values
TILE_BYTES = 16 * MIB  # a tile's queries, output and running softmax
FOLDED_ROWS = 128  # rows whose softmax is computed together: several kv heads of a decode tile, one of a prefill tile


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
    tiles: Mapping[str, int] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """q: [R, Q, N, H] -> [R, Q, N, H].  See the package's `paged_attention`; H a multiple of 128.

    tiles: queries_per_block and pages_per_block; a number left out is computed from the shapes.  interpret: True runs
    the body as plain XLA, `InterpretParams` in the TPU simulator.  Raises ValueError for a head dim, a page size or
    block sizes that the TPU cannot serve.

    An 8-bit pool of pages shorter than 128 tokens wants its scales laid out page after page (`Format(Layout((0, 1, 2,
    3)), sharding)`): the TPU's own choice for so short rows is another, and XLA would copy all scales at every call."""
    sizes = _sizes(q, data, scale, page_table, tiles or {})
    scalars = _Scalars(kv_len, q_len, layer.reshape(1), window.reshape(1))
    # [R, P] -> [R, C, 128]: a row is contiguous, so that one DMA brings it.
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % LANES)))
    table = table.reshape(sizes.num_rows, -1, LANES)
    tile = pl.BlockSpec((1, sizes.queries_per_block, *q.shape[2:]), lambda row, part, *_: (row, part, 0, 0))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, sizes=sizes, num_pages=num_pages, scale_factor=scale_factor, softcap=softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(sizes.num_rows, sizes.tiles_per_row),
            in_specs=[tile, in_hbm, in_hbm, None if scale is None else in_hbm],
            out_specs=tile,
            scratch_shapes=[_scratch_shapes(data, scale, columns=table.shape[1], sizes=sizes)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),  # in order: the stream's state passes from tile to tile
            vmem_limit_bytes=_vmem_bytes(sizes, q, data, scale),
            disable_bounds_checks=True,  # the host checks page ids
        ),
        cost_estimate=_cost(q, data, scale, page_table),
        interpret=interpret,
        name="paged_attention",
    )(scalars, q, table, data, scale)


# ---- Shapes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The numbers that shape one call."""

    num_rows: int  # R
    kv_heads: int  # K
    group: int  # query heads of a kv head: N / K
    head_dim: int  # H
    page_size: int  # T
    queries_per_block: int
    pages_per_block: int
    tiles_per_row: int
    dtype: jnp.dtype  # of the dots' operands: holds an 8-bit pool's numbers exactly

    @property
    def num_tiles(self) -> int:
        return self.num_rows * self.tiles_per_row

    @property
    def queries(self) -> int:
        """Rows of a kv head's matmul in a tile that hold a query; row i * group + g is query i of head g."""
        return self.queries_per_block * self.group

    @property
    def matmul_rows(self) -> int:
        """M: all of them, whole tiles of a register."""
        return _round_up(self.queries, SUBLANES)

    @property
    def block(self) -> int:
        """B: positions of a block."""
        return self.pages_per_block * self.page_size

    @property
    def heads_per_step(self) -> int:
        """Kv heads whose softmax is computed together: a divisor of K."""
        most = max(1, FOLDED_ROWS // self.matmul_rows)
        return max(heads for heads in range(1, self.kv_heads + 1) if self.kv_heads % heads == 0 and heads <= most)


def _sizes(q: Array, data: Array, scale: Array | None, page_table: Array, tiles: Mapping[str, int]) -> _Sizes:
    rows, queries, heads, head_dim = q.shape
    kv_heads, page_size = data.shape[2:4]
    sublanes = SUBLANES * 4 // data.dtype.itemsize
    if head_dim % LANES:
        raise ValueError(f"head dim {head_dim} must be a multiple of {LANES} on TPU: pad the pool's head dim")
    if page_size % sublanes:
        raise ValueError(f"{page_size} tokens a page of {data.dtype} must be a multiple of {sublanes} on TPU")
    if unknown := set(tiles) - {"queries_per_block", "pages_per_block"}:
        raise ValueError(f"tiles {sorted(unknown)} are unknown: there are queries_per_block and pages_per_block")
    if wrong := {name: size for name, size in tiles.items() if size < 1}:
        raise ValueError(f"tiles must be 1 or more, got {wrong}")
    group = heads // kv_heads
    per_tile = min(queries, tiles.get("queries_per_block") or _default_queries(q, kv_heads))
    per_block = tiles.get("pages_per_block") or _default_pages(data, page_table.shape[1], rows=per_tile * group)
    if per_block * page_size % LANES:
        raise ValueError(
            f"{per_block} pages of {page_size} tokens make a block of {per_block * page_size} positions, which must be "
            f"a multiple of {LANES}: choose pages_per_block as a multiple of {LANES // page_size}"
        )
    sizes = _Sizes(
        num_rows=rows,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        queries_per_block=per_tile,
        pages_per_block=per_block,
        tiles_per_row=pl.cdiv(queries, per_tile),
        dtype=q.dtype if data.dtype.itemsize == 1 else jnp.promote_types(q.dtype, data.dtype),
    )
    if (needed := _vmem_bytes(sizes, q, data, scale)) > VMEM_LIMIT:
        raise ValueError(
            f"{per_tile} queries and {per_block} pages a block need {needed / MIB:.1f} MiB of VMEM, above "
            f"{VMEM_LIMIT // MIB}: choose fewer queries_per_block or pages_per_block"
        )
    return sizes


def _default_queries(q: Array, kv_heads: int) -> int:
    """Queries a tile: TILE_ROWS matmul rows or fewer, while a tile fits TILE_BYTES; all tiles of a row equally long."""
    queries = q.shape[1]
    most = max(1, min(TILE_ROWS * kv_heads // q.shape[2], TILE_BYTES // _bytes_of_a_query(q)))
    return pl.cdiv(queries, pl.cdiv(queries, most))


def _default_pages(data: Array, columns: int, *, rows: int) -> int:
    """Pages a block: BLOCK_BYTES, or fewer where the scores would be large or the page table is short."""
    page_size = data.shape[3]
    step = max(1, LANES // page_size)
    page_bytes = data.dtype.itemsize * data[0].size
    positions = 1024 if rows <= 64 else 512
    most = min(BLOCK_BYTES // page_bytes, positions // page_size, _round_up(columns, step))
    return max(step, most // step * step)


def _vmem_bytes(sizes: _Sizes, q: Array, data: Array, scale: Array | None) -> int:
    """What a call holds in VMEM, the scores and weights of a step among it."""
    pages = BUFFERS * sizes.pages_per_block * data[0].size * data.dtype.itemsize
    scales = 0
    if scale is not None:
        a_page = 2 * _round_up(sizes.kv_heads, SUBLANES) * _round_up(sizes.page_size, LANES)
        scales = BUFFERS * sizes.pages_per_block * a_page * scale.dtype.itemsize
    step = 4 * sizes.heads_per_step * sizes.block * (4 * sizes.matmul_rows + 2 * sizes.head_dim)
    return sizes.queries_per_block * _bytes_of_a_query(q) + pages + scales + step + STACK_BYTES


def _bytes_of_a_query(q: Array) -> int:
    """VMEM for a query of a tile with all its heads: two buffers each of input and output, the folded copy, the softmax."""
    heads, head_dim = q.shape[2:]
    in_and_out = 4 * _round_up(heads, 2 * SUBLANES) * head_dim * q.dtype.itemsize
    return in_and_out + heads * 4 * (head_dim + 2 * LANES + head_dim)


def _cost(q: Array, data: Array, scale: Array | None, page_table: Array) -> pl.CostEstimate:
    """An upper bound: full page tables (lengths are unknown when XLA asks)."""
    positions = page_table.size * data.shape[3]
    page_bytes = data[0].size * data.dtype.itemsize + (0 if scale is None else scale[0].size * scale.dtype.itemsize)
    scores = q.shape[1] * q.shape[2] * positions
    return pl.CostEstimate(
        flops=4 * scores * q.shape[3],
        bytes_accessed=page_table.size * page_bytes + 2 * q.size * q.dtype.itemsize,
        transcendentals=scores,
    )


def _round_up(number: int, multiple: int) -> int:
    return pl.cdiv(number, multiple) * multiple


# ---- What lies where --------------------------------------------------------------------------------------------------


class _Scalars(NamedTuple):
    """int32, in SMEM."""

    kv_len: Ref  # [R]
    q_len: Ref  # [R]
    layer: Ref  # [1]
    window: Ref  # [1]


class _Scratch(NamedTuple):
    pages: Ref  # VMEM [BUFFERS, pages_per_block, 2, K, T, H]
    scales: Ref | None  # VMEM [BUFFERS, pages_per_block, 2, K, T]
    arrived: Ref  # DMA semaphores [BUFFERS], counting bytes of pages and scales
    table: Ref  # SMEM [2, C, 128]  rows of the page table: of the tile being fetched and of the one after
    table_arrived: Ref  # DMA semaphores [2]
    cursor: Ref  # SMEM [6]  where the stream stands, see TILE and the others below
    queries: Ref  # VMEM [K, M, H]  the tile's, in the dots' dtype; rows past the last query hold anything
    position: Ref  # VMEM [M, 128] int32  of each matmul row's query, -1 = no query
    top: Ref  # VMEM [K, M, 128] float32  the running softmax: highest score so far,
    total: Ref  # VMEM [K, M, 128] float32  sum of exp(score - top),
    out: Ref  # VMEM [K, M, H] float32  sum of exp(score - top) * value
    # In position, top and total a row's number is repeated in all 128 lanes: it meets a row of scores without a
    # broadcast across lanes.


def _scratch_shapes(data: Array, scale: Array | None, *, columns: int, sizes: _Sizes) -> dict:
    """The memory behind `_Scratch`, by name."""
    blocks, rows = (BUFFERS, sizes.pages_per_block), (sizes.kv_heads, sizes.matmul_rows)
    return {
        "pages": pltpu.VMEM((*blocks, *data.shape[1:]), data.dtype),
        "scales": None if scale is None else pltpu.VMEM((*blocks, *scale.shape[1:]), scale.dtype),
        "arrived": pltpu.SemaphoreType.DMA((BUFFERS,)),
        "table": pltpu.SMEM((2, columns, LANES), jnp.int32),
        "table_arrived": pltpu.SemaphoreType.DMA((2,)),
        "cursor": pltpu.SMEM((6,), jnp.int32),
        "queries": pltpu.VMEM((*rows, sizes.head_dim), sizes.dtype),
        "position": pltpu.VMEM((sizes.matmul_rows, LANES), jnp.int32),
        "top": pltpu.VMEM((*rows, LANES), jnp.float32),
        "total": pltpu.VMEM((*rows, LANES), jnp.float32),
        "out": pltpu.VMEM((*rows, sizes.head_dim), jnp.float32),
    }


# ---- Which tile sees what ---------------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """What a tile sees.  low == high == 0 for an idle tile: no query, or an empty row."""

    start: Array  # position of its first query
    low: Array  # lowest position any of its queries sees
    high: Array  # one past the highest


def _span(scalars: _Scalars, tile: Array, sizes: _Sizes) -> _Span:
    """Tile num_tiles, one past the last, is idle."""
    row = jnp.minimum(lax.div(tile, sizes.tiles_per_row), sizes.num_rows - 1)
    first = (tile - row * sizes.tiles_per_row) * sizes.queries_per_block
    kv_len, q_len = scalars.kv_len[row], scalars.q_len[row]
    count = jnp.where(kv_len > 0, jnp.clip(q_len - first, 0, sizes.queries_per_block), 0)
    start = kv_len - q_len + first
    low = jnp.maximum(start - _window(scalars) + 1, 0)
    return _Span(start, jnp.where(count > 0, low, 0), jnp.where(count > 0, start + count, 0))


def _window(scalars: _Scalars) -> Array:
    window = scalars.window[0]
    return jnp.where(window > 0, window, UNLIMITED)


def _blocks(span: _Span, sizes: _Sizes) -> tuple[Array, Array]:
    """The blocks with a position that a tile sees, as a range; empty for an idle tile."""
    return lax.div(span.low, sizes.block), _cdiv(span.high, sizes.block)


def _pages(span: _Span, block: Array, sizes: _Sizes) -> tuple[Array, Array]:
    """The columns of the page table whose pages a tile needs of a block, as a range."""
    first = block * sizes.pages_per_block
    return (
        jnp.maximum(first, lax.div(span.low, sizes.page_size)),
        jnp.minimum(first + sizes.pages_per_block, _cdiv(span.high, sizes.page_size)),
    )


def _cdiv(number: Array, divisor: int) -> Array:
    return lax.div(number + (divisor - 1), divisor)


# ---- The kernel -------------------------------------------------------------------------------------------------------


def _kernel(
    scalars: _Scalars,
    q: Ref,
    table: Ref,
    data: Ref,
    scale: Ref | None,
    out: Ref,
    scratch_refs: dict[str, Ref],
    *,
    sizes: _Sizes,
    num_pages: int,
    scale_factor: float,
    softcap: float,
) -> None:
    """One tile.  q, out: [1, queries_per_block, N, H] in VMEM; table [R, C, 128], data and scale in HBM."""
    scratch = _Scratch(**scratch_refs)
    stream = _PageStream(scalars, table, data, scale, scratch, scalars.layer[0] * num_pages, sizes)
    tile = pl.program_id(0) * sizes.tiles_per_row + pl.program_id(1)
    pl.when(tile == 0)(stream.open)

    span = _span(scalars, tile, sizes)
    query = lax.div(lax.broadcasted_iota(jnp.int32, scratch.position.shape, 0), jnp.int32(sizes.group))
    position = span.start + query
    scratch.position[...] = jnp.where(position < span.high, position, -1)
    scratch.queries[:, : sizes.queries] = _fold(q[0], sizes).astype(sizes.dtype)
    scratch.top[...] = jnp.full_like(scratch.top, LOWEST)
    scratch.total[...] = jnp.zeros_like(scratch.total)
    scratch.out[...] = jnp.zeros_like(scratch.out)
    attend = partial(
        _attend_block, scratch, span, window=_window(scalars), sizes=sizes, scale_factor=scale_factor, softcap=softcap
    )

    def visit(block: Array, _: None) -> None:
        stream.fetch_next()
        attend(buffer=stream.take(span, block), begin=block * sizes.block)

    lax.fori_loop(*_blocks(span, sizes), visit, None)
    total = scratch.total[...]
    result = scratch.out[...] / _repeat(jnp.where(total > 0, total, 1), sizes.head_dim)
    out[0] = _unfold(result[:, : sizes.queries], sizes).astype(out.dtype)


def _fold(q: Array, sizes: _Sizes) -> Array:
    """[queries_per_block, N, H] -> [K, queries_per_block * group, H]"""
    q = q.reshape(sizes.queries_per_block, sizes.kv_heads, sizes.group, sizes.head_dim)
    return q.swapaxes(0, 1).reshape(sizes.kv_heads, sizes.queries, sizes.head_dim)


def _unfold(out: Array, sizes: _Sizes) -> Array:
    """[K, queries_per_block * group, H] -> [queries_per_block, N, H]"""
    out = out.reshape(sizes.kv_heads, sizes.queries_per_block, sizes.group, sizes.head_dim)
    return out.swapaxes(0, 1).reshape(sizes.queries_per_block, -1, sizes.head_dim)


# What `cursor` holds.  Fetching stands at block BLOCK of tile TILE; the next busy tile is FOLLOWING; SIDE of `table` is
# TILE's.  The next block to fetch goes into buffer FETCHED, the next one to use lies in buffer TAKEN.
TILE, BLOCK, FOLLOWING, SIDE, FETCHED, TAKEN = range(6)


@dataclass(frozen=True)
class _PageStream:
    """All blocks of all tiles, in order, through BUFFERS buffers.

    The protocol: `open` starts the first BUFFERS - 1 blocks.  Then every block is used by `fetch_next`, `take`, reading,
    in this order.  `fetch_next` starts the block BUFFERS - 1 places ahead, perhaps a later tile's, into the buffer whose
    block was used last; `take` waits for the block whose turn it is.  So a buffer is overwritten after its last reader
    is done, it is read when its pages are here, and after the last tile every started DMA has been waited for.

    Pages count as bytes on their buffer's semaphore: `take` waits for as many pages as `fetch_next` started, `_pages`
    of the same tile and block on both sides."""

    scalars: _Scalars
    table: Ref  # HBM [R, C, 128]
    data: Ref  # HBM [L * NP, 2, K, T, H]
    scale: Ref | None  # HBM [L * NP, 2, K, T]
    scratch: _Scratch
    first_row: Array  # of the layer in the pool
    sizes: _Sizes

    def open(self) -> None:
        cursor = self.scratch.cursor
        cursor[SIDE] = cursor[FETCHED] = cursor[TAKEN] = jnp.int32(0)
        tile = self._busy_from(jnp.int32(0))
        self._start_table(tile, jnp.int32(0))
        self._enter(tile)
        lax.fori_loop(0, BUFFERS - 1, lambda *_: self.fetch_next(), None)

    def fetch_next(self) -> None:
        """Starts the stream's next block, if there is one."""
        cursor = self.scratch.cursor
        tile, block = cursor[TILE], cursor[BLOCK]

        @pl.when(tile < self.sizes.num_tiles)
        def _() -> None:
            span = _span(self.scalars, tile, self.sizes)
            first, end = _blocks(span, self.sizes)

            @pl.when(block == first)
            def _() -> None:
                cursor[FOLLOWING] = self._busy_from(tile + 1)
                _wait(self._table_copy(tile, cursor[SIDE]))
                # The other side's pages have all been started: nobody reads it any more.
                self._start_table(cursor[FOLLOWING], 1 - cursor[SIDE])

            self._start_pages(span, block)
            cursor[FETCHED] = _next_buffer(cursor[FETCHED])
            cursor[BLOCK] = block + 1

            @pl.when(block + 1 == end)
            def _() -> None:
                cursor[SIDE] = 1 - cursor[SIDE]
                self._enter(cursor[FOLLOWING])

    def take(self, span: _Span, block: Array) -> Array:
        """Waits for the block whose turn it is, which is `block` of the tile that sees `span` -> its buffer."""
        cursor = self.scratch.cursor
        buffer = cursor[TAKEN]
        cursor[TAKEN] = _next_buffer(buffer)

        def wait_page(page: Array) -> None:
            for copy in self._page_copies(jnp.int32(0), page - block * self.sizes.pages_per_block, buffer):
                _wait(copy)  # for its bytes: which row of the pool they came from does not matter

        _for_each(*_pages(span, block, self.sizes), wait_page)
        return buffer

    def _enter(self, tile: Array) -> None:
        self.scratch.cursor[TILE] = tile
        self.scratch.cursor[BLOCK] = _blocks(_span(self.scalars, tile, self.sizes), self.sizes)[0]

    def _busy_from(self, tile: Array) -> Array:
        """The first tile from `tile` on that sees anything; num_tiles when there is none."""

        def skip(tile: Array) -> tuple[Array, Array]:
            is_idle = _span(self.scalars, tile, self.sizes).high == 0
            return tile, is_idle & (tile < self.sizes.num_tiles)

        return lax.while_loop(lambda at: at[1], lambda at: skip(at[0] + 1), skip(tile))[0]

    def _start_pages(self, span: _Span, block: Array) -> None:
        buffer, side = self.scratch.cursor[FETCHED], self.scratch.cursor[SIDE]

        def start_page(page: Array) -> None:
            # Shift and mask: a signed division by 128 is ten instructions, as many as the rest of a page's start.
            row = self.first_row + self.scratch.table[side, page >> 7, page & (LANES - 1)]
            for copy in self._page_copies(row, page - block * self.sizes.pages_per_block, buffer):
                copy.start()

        _for_each(*_pages(span, block, self.sizes), start_page)

    def _page_copies(self, row: Array, place: Array, buffer: Array) -> list[_Copy]:
        """Row `row` of the pool into page `place` of a buffer."""
        arrived = self.scratch.arrived.at[buffer]
        copies: list[_Copy] = [pltpu.make_async_copy(self.data.at[row], self.scratch.pages.at[buffer, place], arrived)]
        if self.scale is not None and self.scratch.scales is not None:
            target = self.scratch.scales.at[buffer, place]
            copies.append(pltpu.make_async_copy(self.scale.at[row], target, arrived))
        return copies

    def _start_table(self, tile: Array, side: Array) -> None:
        @pl.when(tile < self.sizes.num_tiles)
        def _() -> None:
            self._table_copy(tile, side).start()

    def _table_copy(self, tile: Array, side: Array) -> _Copy:
        row, scratch = lax.div(tile, self.sizes.tiles_per_row), self.scratch
        return pltpu.make_async_copy(self.table.at[row], scratch.table.at[side], scratch.table_arrived.at[side])


class _Copy(Protocol):
    """A DMA, as `pltpu.make_async_copy` describes it."""

    def start(self) -> None: ...

    def wait(self) -> None: ...


def _wait(copy: _Copy) -> None:
    """Every wait of the kernel goes through here, so that a test can leave them out."""
    copy.wait()


def _for_each(first: Array, end: Array, act: Callable[[Array], None]) -> None:
    """act(i) for first <= i < end, four a turn: a turn's branch and its address arithmetic cost more than a DMA's start."""
    turns = lax.div(end - first, 4)

    def act_on_four(turn: Array, _: None) -> None:
        for i in range(4):
            act(first + 4 * turn + i)

    lax.fori_loop(0, turns, act_on_four, None)
    lax.fori_loop(first + 4 * turns, end, lambda i, _: act(i), None)


def _next_buffer(buffer: Array) -> Array:
    return jnp.where(buffer == BUFFERS - 1, 0, buffer + 1)


# ---- A block's arithmetic ---------------------------------------------------------------------------------------------


def _attend_block(
    scratch: _Scratch,
    span: _Span,
    *,
    buffer: Array,
    begin: Array,
    window: Array,
    sizes: _Sizes,
    scale_factor: float,
    softcap: float,
) -> None:
    """Adds the positions [begin, begin + B) of a buffer to the tile's softmax.  Those outside the span may hold
    anything: masked as keys, cleared as values."""
    heads, rows, block = sizes.heads_per_step, sizes.matmul_rows, sizes.block
    at = begin + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
    position = _repeat(scratch.position[...], block)
    sees = (at <= position) & (at > position - window)  # [M, B]
    _clear_values(scratch, span, buffer=buffer, begin=begin, sizes=sizes)

    def scores(head: Array) -> Array:
        score = _dot(scratch.queries[head], _numbers(scratch, buffer, 0, head, sizes), contract=1)  # [M, B]
        if scratch.scales is not None:
            score = score * _scales(scratch.scales, buffer, 0, head, sizes)
        score = score * scale_factor
        if softcap:
            score = softcap * jnp.tanh(score / softcap)
        return jnp.where(sees, score, MASKED)

    def weighted_sum(weight: Array, head: Array) -> Array:
        if scratch.scales is not None:
            weight = jnp.where(sees, weight * _scales(scratch.scales, buffer, 1, head, sizes), 0)
        return _dot(weight.astype(sizes.dtype), _numbers(scratch, buffer, 1, head, sizes), contract=0)  # [M, H]

    def attend_heads(step: Array, _: None) -> None:
        """The softmax of several heads at once: long vectors, and dots that do not wait for each other."""
        first = step * heads
        mine = pl.ds(first, heads)
        score = jnp.concatenate([scores(first + i) for i in range(heads)])  # [heads * M, B]
        old_top = scratch.top[mine].reshape(-1, LANES)
        top = jnp.maximum(old_top, jnp.max(score, 1, keepdims=True))
        weight = jnp.exp(score - _repeat(top, block))
        keep = jnp.exp(old_top - top)
        total = scratch.total[mine].reshape(-1, LANES) * keep + jnp.sum(weight, 1, keepdims=True)
        added = [weighted_sum(weight[i * rows : (i + 1) * rows], first + i) for i in range(heads)]
        old_out = scratch.out[mine].reshape(-1, sizes.head_dim)
        out = old_out * _repeat(keep, sizes.head_dim) + jnp.concatenate(added)
        scratch.top[mine] = top.reshape(heads, rows, LANES)
        scratch.total[mine] = total.reshape(heads, rows, LANES)
        scratch.out[mine] = out.reshape(heads, rows, sizes.head_dim)

    lax.fori_loop(0, sizes.kv_heads // heads, attend_heads, None)


def _clear_values(scratch: _Scratch, span: _Span, *, buffer: Array, begin: Array, sizes: _Sizes) -> None:
    """Zeroes a block's values outside the span, because 0 * NaN is NaN.  Only a tile's first and last block have such
    pages, so the loops are empty in the others; an int8 pool holds no NaN."""
    stored, size = scratch.pages.dtype, sizes.page_size
    if jnp.issubdtype(stored, jnp.integer):
        return

    def clear(place: Array, _: None) -> None:
        at = begin + place * size + lax.broadcasted_iota(jnp.int32, (size, sizes.head_dim), 0)
        holds = (at >= span.low) & (at < span.high)
        for head in range(sizes.kv_heads):
            value = scratch.pages[buffer, place, 1, head].astype(sizes.dtype)
            scratch.pages[buffer, place, 1, head] = jnp.where(holds, value, jnp.zeros_like(value)).astype(stored)

    before = jnp.clip(_cdiv(span.low - begin, size), 0, sizes.pages_per_block)
    after = jnp.clip(lax.div(span.high - begin, size), before, sizes.pages_per_block)
    lax.fori_loop(0, before, clear, None)
    lax.fori_loop(after, sizes.pages_per_block, clear, None)


def _numbers(scratch: _Scratch, buffer: Array, side: int, head: Array, sizes: _Sizes) -> Array:
    """A kv head's keys (side 0) or values (side 1) of a block: [B, H]."""
    return scratch.pages[buffer, :, side, head].reshape(sizes.block, sizes.head_dim).astype(sizes.dtype)


def _scales(scales: Ref, buffer: Array, side: int, head: Array, sizes: _Sizes) -> Array:
    """Their scales: [1, B].  They meet the scores and the weights rather than the numbers: fewer products, and they lie
    along the lanes already."""
    return scales[buffer, :, side, head].reshape(1, sizes.block)


def _dot(a: Array, b: Array, *, contract: int) -> Array:
    """a [M, X] with axis `contract` of b, both of one dtype -> float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def _repeat(x: Array, width: int) -> Array:
    """[..., 128] with one number in all lanes -> [..., width]"""
    return jnp.concatenate([x] * (width // LANES), axis=-1)
