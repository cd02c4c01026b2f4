"""Paged attention for Hopper GPUs through Pallas' Triton backend.

One program takes one kv head of one row and a block of its queries.  The G query heads of that kv head are folded
beside the queries into the rows of its matmuls; the row's positions go by in blocks under a running softmax
(FlashAttention-2, arXiv 2307.08691).  Where rows x kv heads do not fill the chip, several programs share a row's
positions and their float32 partials are merged by log-sum-exp (Flash-Decoding; Dao, Haziza, Massa, Sizov 2023).

The pool is read where it lies, as flat rows of H, each position's row worked out from its page: the compiler makes
16-byte asynchronous copies of that, `num_stages` - 1 blocks of keys and values ahead of the matmuls.  Positions that
nobody sees are never fetched; they read as zero."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

PROGRAMS = 2 * 132  # run at once on an H200: two on each of its processors
WARPGROUP_ROWS = 64  # rows of the smallest matmul that four warps do together (wgmma); below, each warp does its own
BLOCK_BYTES = 32 * 1024  # a block's keys and values, as 16 bits: three in flight, twice, fill a processor's memory
UNSEEN = -1e30  # score of a position that a query does not see
LOWEST = -1e20  # a running maximum's start: so far above UNSEEN that the weight of an unseen position is always 0
LOG2_E = 1.4426950408889634  # the softmax counts in powers of two, which the chip has an instruction for


class Sizes(NamedTuple):
    """Block sizes; `tiles` overrides each by its name."""

    block: int  # positions a step; a multiple of the page size or a part of it
    queries_per_block: int  # queries a program
    splits: int  # programs that share a row's positions
    num_warps: int
    num_stages: int


class _Plan(NamedTuple):
    """What a program knows when it is compiled."""

    queries: int  # Q
    group: int  # G = N / K, query heads a kv head
    kv_heads: int  # K
    page_size: int  # T
    num_pages: int  # NP
    scale_factor: float
    softcap: float
    sizes: Sizes

    @property
    def folded(self) -> int:
        """M, the rows of a program's matmuls: its queries x G, up to a power of two that the tensor cores take."""
        return max(16, pl.next_power_of_2(self.sizes.queries_per_block * self.group))


class _Block(NamedTuple):
    """One program's share of the work: queries in M folded rows, positions from block `begin` to before `end`."""

    line: Array  # [M] where a folded row lies in [Q * N]
    is_real: Array  # [M] false in rows that only fill M up
    position: Array  # [M] the last position a folded row sees; -1 = idle
    before: Array  # [M] the last position before its window
    low: Array  # lowest position that any query of the program sees
    high: Array  # one past the highest
    begin: Array
    end: Array


class _Softmax(NamedTuple):
    """A running softmax, in float32 and powers of two."""

    out: Array  # [M, H] sum of 2 ** (score - top) * value
    top: Array  # [M] highest score so far
    total: Array  # [M] sum of 2 ** (score - top)


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
    interpret: bool = False,
) -> Array:
    """q: [R, Q, N, H] -> [R, Q, N, H].  See the package's `paged_attention`.

    tiles: any of the fields of `Sizes`.  interpret: run the programs one by one in XLA, to try them without a GPU.
    Raises ValueError for head dims, dtypes, pool sizes and tiles that it cannot serve."""
    num_rows, queries, heads, head_dim = q.shape
    kv_heads, page_size = data.shape[2:4]
    _check(q, data)
    sizes = _sizes(q, data, page_table.shape[1], tiles or {})
    plan = _Plan(queries, heads // kv_heads, kv_heads, page_size, num_pages, scale_factor, softcap, sizes)
    lines = queries * heads

    def row_of(*shape: int) -> pl.BlockSpec:  # one row's part of an array [R, *shape]
        return pl.BlockSpec((None, *shape), lambda tile, head, split, row: (row, *(0 for _ in shape)))

    def part_of(*shape: int) -> pl.BlockSpec:  # one split's part of an array [R, splits, *shape]
        return pl.BlockSpec((None, None, *shape), lambda tile, head, split, row: (row, split, *(0 for _ in shape)))

    def whole(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    scalars = (layer.reshape(1), window.reshape(1), kv_len, q_len)
    pool = data.reshape(-1, head_dim)
    scales = None if scale is None else scale.reshape(-1)
    if sizes.splits == 1:
        out_shape = [jax.ShapeDtypeStruct((num_rows, lines, head_dim), q.dtype)]
        out_specs = [row_of(lines, head_dim)]
    else:
        partials = ((lines, head_dim), (lines,), (lines,))
        out_shape = [jax.ShapeDtypeStruct((num_rows, sizes.splits, *shape), jnp.float32) for shape in partials]
        out_specs = [part_of(*shape) for shape in partials]
    outs = pl.pallas_call(
        partial(_kernel, plan=plan),
        grid=(pl.cdiv(queries, sizes.queries_per_block), kv_heads, sizes.splits, num_rows),
        in_specs=[
            *map(whole, scalars), row_of(page_table.shape[1]), row_of(lines, head_dim), whole(pool),
            None if scales is None else whole(scales),
        ],
        out_shape=out_shape,
        out_specs=out_specs,
        compiler_params=plt.CompilerParams(num_warps=sizes.num_warps, num_stages=sizes.num_stages),
        interpret=interpret,
        name="paged_attention_triton",
    )(*scalars, page_table, q.reshape(num_rows, lines, head_dim), pool, scales)  # fmt: skip
    out = outs[0] if sizes.splits == 1 else _merge(_Softmax(*outs)).astype(q.dtype)
    return out.reshape(q.shape)


def _kernel(
    layer_ref, window_ref, kv_len_ref, q_len_ref, table_ref, q_ref, pool_ref, scales_ref, *out_refs, plan: _Plan
):
    """One program.  table [P], q [Q * N, H], pool [L * NP * 2 * K * T, H], scales [L * NP * 2 * K * T] or None; out
    [Q * N, H], or with splits the fields of a _Softmax: [Q * N, H], [Q * N], [Q * N]."""
    head, row = pl.program_id(1), pl.program_id(3)
    block, page_size = plan.sizes.block, plan.page_size
    first_page = layer_ref[0] * plan.num_pages
    my = _block(kv_len_ref[row], q_len_ref[row], window_ref[0], plan)
    query = _load_lines(q_ref, my.line, my.is_real).astype(_dot_dtype(q_ref.dtype, pool_ref.dtype))
    step = lax.iota(jnp.int32, block)

    def page_at(index):
        """The page(s) that block `index` lies on: a scalar, or one for each of its positions; 0 past the end."""
        if page_size % block == 0:
            return plt.load(table_ref.at[lax.div(index * block, page_size)], mask=index < my.end, other=0)
        column = index * (block // page_size) + lax.div(step, page_size)
        return plt.load(table_ref.at[column], mask=index * block + step < my.high, other=0)

    def scale_of(lines, holds):
        return plt.load(scales_ref.at[lines], mask=holds, other=0).astype(jnp.float32)[None, :]

    def attend_block(index, carry):
        page, softmax = carry
        following = page_at(index + 1)  # asked for one step early: the copies of its block must not wait for it
        at = index * block + step  # [B]
        holds = (at >= my.low) & (at < my.high)
        offset = lax.rem(index * block, page_size) + step if page_size % block == 0 else lax.rem(step, page_size)
        keys_at = ((first_page + page) * 2 * plan.kv_heads + head) * page_size + offset
        values_at = keys_at + plan.kv_heads * page_size
        key, value = (_load_lines(pool_ref, lines, holds).astype(query.dtype) for lines in (keys_at, values_at))
        if pool_ref.dtype.itemsize == 1 and plan.folded < WARPGROUP_ROWS:
            # Says nothing new, but keeps the compiler from fetching V in the order of its matmul: 8 bytes a copy.
            value = jnp.where(_spread(holds, value.shape[1]), value, 0)
        score = _dot(query, key, contract=(1, 1))  # [M, B]
        if scales_ref is not None:
            score *= scale_of(keys_at, holds)
        if plan.softcap:
            score = plan.softcap * LOG2_E * jnp.tanh(score * (plan.scale_factor / plan.softcap))
        else:
            score *= plan.scale_factor * LOG2_E
        sees = (at[None, :] <= my.position[:, None]) & (at[None, :] > my.before[:, None])
        score = jnp.where(sees, score, UNSEEN)
        top = jnp.maximum(softmax.top, score.max(1))
        weight = jnp.exp2(score - top[:, None])
        keep = jnp.exp2(softmax.top - top)
        total = softmax.total * keep + weight.sum(1)
        if scales_ref is not None:
            weight *= scale_of(values_at, holds)
        out = softmax.out * keep[:, None] + _dot(weight.astype(value.dtype), value, contract=(1, 0))
        return following, _Softmax(out, top, total)

    nothing = jnp.zeros(plan.folded, jnp.float32)
    start = _Softmax(jnp.zeros(query.shape, jnp.float32), nothing + LOWEST, nothing)
    _, softmax = lax.fori_loop(my.begin, my.end, attend_block, (page_at(my.begin), start))
    if plan.sizes.splits == 1:
        out = softmax.out / jnp.where(softmax.total > 0, softmax.total, 1)[:, None]
        _store_lines(out_refs[0], my.line, my.is_real, out)
    else:
        _store_lines(out_refs[0], my.line, my.is_real, softmax.out)
        plt.store(out_refs[1].at[my.line], softmax.top, mask=my.is_real)
        plt.store(out_refs[2].at[my.line], softmax.total, mask=my.is_real)


def _block(kv_len: Array, q_len: Array, window: Array, plan: _Plan) -> _Block:
    """What program (tile, head, split, row) works on.  The last tile, whose queries see most, comes first."""
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    head, split = pl.program_id(1), pl.program_id(2)
    size, block, splits = plan.sizes.queries_per_block, plan.sizes.block, plan.sizes.splits
    start = kv_len - q_len  # position of the row's first query; in an idle row none is above -1
    first = tile * size  # the program's first query
    folded = lax.iota(jnp.int32, plan.folded)
    nth = lax.div(folded, plan.group)
    query = first + nth
    line = (query * plan.kv_heads + head) * plan.group + lax.rem(folded, plan.group)
    is_real = (nth < size) & (query < plan.queries)
    position = jnp.where(is_real & (query < q_len), start + query, -1)
    before = position - jnp.where(window > 0, window, 2**31 - 1)
    low = jnp.where(window > 0, jnp.maximum(start + first - window + 1, 0), 0)
    high = jnp.where(first < q_len, start + jnp.minimum(first + size, q_len), 0)
    begin, end = lax.div(low, block), lax.div(high + block - 1, block)
    share = lax.div(end - begin + splits - 1, splits)
    begin += split * share
    return _Block(line, is_real, position, before, low, high, begin, jnp.minimum(begin + share, end))


def _load_lines(ref, lines: Array, mask: Array) -> Array:
    """ref [_, H], lines [B] int32, mask [B] -> [B, H], zeros where not mask."""
    index, across = _spread(lines, ref.shape[-1]), _across(lines, ref.shape[-1])
    return plt.load(ref.at[index, across], mask=_spread(mask, ref.shape[-1]), other=jnp.zeros((), ref.dtype))


def _store_lines(ref, lines: Array, mask: Array, new: Array) -> None:
    """new [B, H] to the rows `lines` [B] of ref [_, H], where mask [B]."""
    index, across = _spread(lines, ref.shape[-1]), _across(lines, ref.shape[-1])
    plt.store(ref.at[index, across], new.astype(ref.dtype), mask=_spread(mask, ref.shape[-1]))


def _spread(lines: Array, head_dim: int) -> Array:
    """[B] -> [B, H]"""
    return lax.broadcast_in_dim(lines, (lines.shape[0], head_dim), (0,))


def _across(lines: Array, head_dim: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (lines.shape[0], head_dim), 1)


def _dot(a: Array, b: Array, *, contract: tuple[int, int]) -> Array:
    """A matmul over axis contract[0] of a and contract[1] of b, into float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def _dot_dtype(query: jnp.dtype, pool: jnp.dtype) -> jnp.dtype:
    """Of the matmuls' operands.  8-bit numbers are exact in any float; their scales stay outside, in float32."""
    return query if pool.itemsize == 1 or pool == query else jnp.dtype(jnp.float32)


def _merge(parts: _Softmax) -> Array:
    """The softmaxes over a row's splits, [R, splits, Q * N (, H)] -> [R, Q * N, H] float32."""
    keep = jnp.exp2(parts.top - parts.top.max(1, keepdims=True))
    total = (parts.total * keep).sum(1)
    return (parts.out * keep[..., None]).sum(1) / jnp.where(total > 0, total, 1)[..., None]


def _sizes(q: Array, data: Array, num_columns: int, tiles: Mapping[str, int]) -> Sizes:
    """The default block sizes for these shapes, with what `tiles` says in their place."""
    unknown = sorted(set(tiles) - set(Sizes._fields))
    if unknown:
        raise ValueError(f"tiles {', '.join(unknown)} are none of {', '.join(Sizes._fields)}")
    if too_small := {name: size for name, size in tiles.items() if size < 1}:
        raise ValueError(f"tiles must be at least 1, got {too_small}")
    num_rows, queries, heads, head_dim = q.shape
    kv_heads, page_size = data.shape[2:4]
    group = heads // kv_heads

    def programs(queries_per_block: int) -> int:
        return num_rows * kv_heads * pl.cdiv(queries, queries_per_block)

    # What 255 registers a thread hold: rows of a matmul where programs are few and many, and positions of a block.
    uses_tensor_cores = _dot_dtype(q.dtype, data.dtype) != jnp.float32
    is_narrow = data.dtype.itemsize == 1
    if not uses_tensor_cores:  # operands live in registers, as a whole where they were converted
        few = many = longest = 32 if data.dtype == jnp.float32 else 16
    elif is_narrow and head_dim > 128:
        few, many, longest = 64, 64, 128
    else:
        few, many, longest = 64, 128, 128
    few, many = max(1, few // group), max(1, many // group)
    size = tiles.get("queries_per_block", min(queries, many if programs(many) >= PROGRAMS else few))
    folded = max(16, pl.next_power_of_2(size * group))
    block = BLOCK_BYTES // (2 * head_dim * (2 if is_narrow else data.dtype.itemsize))
    block = min(block, longest if folded <= WARPGROUP_ROWS else 64)
    while page_size % block and block % page_size:
        block //= 2
    block = tiles.get("block", block)
    defaults = Sizes(
        block=block,
        queries_per_block=size,
        splits=max(1, min(PROGRAMS // programs(size), num_columns * page_size // block)),
        num_warps=4 if uses_tensor_cores and folded <= 64 and folded * head_dim <= 64 * 128 else 8,
        num_stages=4 if folded < WARPGROUP_ROWS else 3,
    )
    sizes = defaults._replace(**tiles)
    _check_sizes(sizes, group=group, page_size=page_size)
    return sizes


def _check(q: Array, data: Array) -> None:
    head_dim = data.shape[-1]
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"a pool of head dim {head_dim} must be padded to 16, 32, 64, 128 or 256")
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    if data.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn):
        raise ValueError(f"a pool must be float32, bfloat16, float16, int8 or float8_e4m3fn, got {data.dtype}")
    if data.size // head_dim >= 2**31:
        raise ValueError(f"a pool of {data.size // head_dim} rows of {head_dim} is past the int32 that counts them")
    # Triton reaches arrays of up to 4 GiB by signed 32-bit offsets in elements, larger ones by 64-bit offsets.
    if data.dtype.itemsize == 1 and 2**31 < data.size <= 2**32:
        page = data.size // data.shape[0]
        raise ValueError(
            f"a pool of {data.dtype} must not lie between 2 and 4 GiB, where the compiler's 32-bit offsets overflow: "
            f"{data.shape[0]} pages of {page} bytes in all layers, take at most {2**31 // page} or at least {2**32 // page + 1}"
        )


def _check_sizes(sizes: Sizes, *, group: int, page_size: int) -> None:
    if sizes.block not in (16, 32, 64, 128, 256) or (page_size % sizes.block and sizes.block % page_size):
        raise ValueError(
            f"tile block={sizes.block} must be a power of two from 16 to 256, a multiple or a part of the page size {page_size}"
        )
    if sizes.queries_per_block * group > 256:
        raise ValueError(
            f"{sizes.queries_per_block} queries a block x {group} query heads a kv head are above the 256 rows of a matmul"
        )
    if sizes.num_warps not in (1, 2, 4, 8, 16):
        raise ValueError(f"tile num_warps={sizes.num_warps} must be a power of two up to 16")
