"""Paged attention for Hopper GPUs on Pallas' Mosaic GPU backend: pages fetched by TMA, dots by wgmma.

A program owns up to 64 (query, head) pairs of one row and one kv head per compute warpgroup: the G query heads that
share a kv head are folded with their queries into the 64 rows of a wgmma, so a page is fetched once for all of them.
One more warpgroup does nothing but fetch: blocks of keys and values travel by page id into a ring of shared-memory
slots, a barrier `full` tells that a slot has arrived, a barrier `free` that every compute warpgroup is done with it.
A decode step has too few programs to fill the chip, so a row's blocks are split over several, whose partial results are
merged afterwards by their log-sum-exp (Flash-Decoding, Dao et al. 2023).

What may be seen is worked out in plain XLA: per pair its oldest and newest position, per program its first block and
how many.  The kernel knows no window, no padding and no idle row, only these numbers.

Written for two readers: the CUDA compiler of every supported jax, and the GPU simulator that jax has from 0.11 on.  The
simulator takes wgmma operands from shared memory only and starts every accumulator at zero, so the weights pass through
shared memory, and one line, `_add_dot`, differs under it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from math import e, log2
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LINES = 64  # rows of a wgmma: (query, head) pairs of one warpgroup
SLICE = 64  # bfloat16 numbers of a 128-byte swizzle: head dims come in multiples of it
LOG2_E = log2(e)
HIDDEN = -1e30  # the score of a position that is not seen
LOWEST = -1e20  # where the running maximum starts: so far above HIDDEN that exp2(HIDDEN - top) is 0
LINE, TILE = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA  # registers of [64] and of [64, n]
SHARED_MEMORY = 224 * 1024  # bytes a program may take: 227 KiB less barriers and small things
PROCESSORS = 132  # of an H200; one program on each, for registers and shared memory
# Of two computing warpgroups and the fetching one, in a program that starts with 168 a thread: 2 * 232 + 40 = 3 * 168.
# A program that asks for more than it started with waits forever.
COMPUTING_REGISTERS, FETCHING_REGISTERS = 232, 40


class Sizes(NamedTuple):
    """Block sizes; `tiles` overrides each by its name."""

    block: int  # positions a step
    stages: int  # blocks on their way or in use
    warpgroups: int  # that compute, 1 or 2; each has 64 lines of its own
    splits: int  # of a row's blocks


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

    tiles: any of the fields of `Sizes`.  interpret: run under the GPU simulator, with its race detector.  Raises
    ValueError for dtypes, head dims and block sizes that it cannot serve."""
    _check(q, data)
    rows, queries, heads, head_dim = q.shape
    kv_heads = data.shape[2]
    group = heads // kv_heads
    sizes = _sizes(q, data, page_table.shape[1], tiles or {})
    per_tile = min(queries, LINES // group)  # queries of one warpgroup
    lines = pl.cdiv(per_tile * group, 8) * 8  # of the 64, those that travel: whole tiles of a swizzle
    num_tiles = pl.cdiv(queries, per_tile * sizes.warpgroups) * sizes.warpgroups
    seen = _seen(kv_len, q_len, window, num_tiles=num_tiles, per_tile=per_tile, group=group)
    out_lines, out_dtype = (lines, q.dtype) if sizes.splits == 1 else (LINES, jnp.dtype(jnp.float32))
    out_shape = (sizes.splits, rows, kv_heads, num_tiles, out_lines)
    parts, weights = plgpu.kernel(
        partial(_kernel, sizes=sizes, scale_factor=scale_factor, softcap=softcap, is_simulated=interpret),
        out_type=[
            jax.ShapeDtypeStruct((*out_shape, head_dim), out_dtype),
            jax.ShapeDtypeStruct((*out_shape[:-1], LINES), jnp.float32),
        ],
        grid=(num_tiles // sizes.warpgroups, kv_heads * sizes.splits, rows),
        grid_names=("tiles", "head_and_split", "row"),
        num_threads=sizes.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        scratch_types=_scratch(sizes, data),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_simulator() if interpret else False,
    )(
        _fold(q, kv_heads, per_tile=per_tile, num_tiles=num_tiles, lines=lines),
        data, layer * num_pages + page_table, _work(seen, sizes), seen,
    )  # fmt: skip
    return _unfold(_merge(parts, weights[..., :out_lines]), q, per_tile)


def _kernel(
    q_ref, data_ref, pages_ref, work_ref, seen_ref, out_ref, weight_ref,
    q_smem, k_smem, v_smem, p_smem, seen_smem, here, full, free, cleaned,
    *, sizes: Sizes, scale_factor: float, softcap: float, is_simulated: bool,
):  # fmt: skip
    """q_ref [R, K, tiles, lines, H]; data_ref [L * NP, 2, K, T, H]; pages_ref [R, P]; work_ref and seen_ref as `_work`
    and `_seen` make them; out_ref [splits, R, K, tiles, lines or 64, H] and weight_ref [splits, R, K, tiles, 64]."""
    row, tiles, warpgroup = (lax.axis_index(name) for name in ("row", "tiles", "warpgroup"))
    head = lax.div(lax.axis_index("head_and_split"), jnp.int32(sizes.splits))
    split = lax.rem(lax.axis_index("head_and_split"), jnp.int32(sizes.splits))
    first, count, low, high = (work_ref[row, tiles, split, i] for i in range(4))
    lines, (page_size, head_dim) = q_ref.shape[3], data_ref.shape[3:]
    block, stages = sizes.block, jnp.int32(sizes.stages)

    def fetch(step, slot):
        """Starts the copies of one block: whole pages, or a part of one."""
        piece = min(block, page_size)
        for begin in range(0, block, piece):
            at = (first + step) * block + begin
            column = jnp.minimum(lax.div(at, jnp.int32(page_size)), pages_ref.shape[1] - 1)
            page, offset = pages_ref[row, column], lax.rem(at, jnp.int32(page_size))
            for side, smem in enumerate((k_smem, v_smem)):
                source = data_ref.at[page, side, head, pl.ds(offset, piece)]
                plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(begin, piece)], full.at[slot])

    @pl.when(warpgroup == sizes.warpgroups)
    def _fetch_blocks():
        if sizes.warpgroups > 1:
            plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")

        @pl.loop(0, count + stages)  # past the last block: until every slot is free again
        def _next(step):
            slot = lax.rem(step, stages)

            @pl.when(step >= stages)
            def _wait():
                plgpu.barrier_wait(free.at[slot])

            @pl.when(step < count)
            def _fetch():
                fetch(step, slot)

    @pl.when(warpgroup < sizes.warpgroups)
    def _compute():
        if sizes.warpgroups > 1:
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
        tile = tiles * sizes.warpgroups + warpgroup
        my_q, my_p, my_seen = q_smem.at[warpgroup], p_smem.at[warpgroup], seen_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[row, head, tile], my_q.at[pl.ds(0, lines)], here.at[warpgroup])
        plgpu.copy_gmem_to_smem(seen_ref.at[row, tile], my_seen, here.at[warpgroup])
        plgpu.barrier_wait(here.at[warpgroup])
        oldest, newest = (plgpu.layout_cast(my_seen[i], LINE) for i in range(2))

        def attend(step, carry):
            out, top, total = carry
            slot = lax.rem(step, stages)
            start = (first + step) * block
            plgpu.barrier_wait(full.at[slot])

            @pl.when((start < low) | (start + block > high))
            def _clean():
                _zero_unseen(v_smem.at[slot], start, low, high, warpgroup, sizes.warpgroups)
                plgpu.commit_smem()
                if sizes.warpgroups > 1:
                    plgpu.barrier_arrive(cleaned)
                    plgpu.barrier_wait(cleaned)

            if is_simulated:  # its race detector does not see what a wgmma reads
                _ = k_smem.at[slot][...], v_smem.at[slot][...]
            score = _scaled(_dot(my_q, k_smem.at[slot].transpose((1, 0)), block), scale_factor, softcap)
            at = plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=TILE)
            sees = (at >= _across(oldest - start, block)) & (at <= _across(newest - start, block))
            score = jnp.where(sees, score, HIDDEN)
            new_top = jnp.maximum(top, score.max(axis=1))
            keep = jnp.exp2(top - new_top)
            p = jnp.exp2(score - _across(new_top, block))
            total = total * keep + p.sum(axis=1)
            my_p[...] = p.astype(p_smem.dtype)
            plgpu.commit_smem()
            out = _add_dot(out * _across(keep, head_dim), my_p, v_smem.at[slot], is_simulated)
            plgpu.barrier_arrive(free.at[slot])
            return out, new_top, total

        out = plgpu.layout_cast(jnp.zeros((LINES, head_dim), jnp.float32), TILE)
        top = plgpu.layout_cast(jnp.full((LINES,), LOWEST, jnp.float32), LINE)
        total = plgpu.layout_cast(jnp.zeros((LINES,), jnp.float32), LINE)
        out, top, total = lax.fori_loop(0, count, attend, (out, top, total))
        total = jnp.maximum(total, 1e-30)  # a line that has seen nothing: zeros, of no weight
        out = out * _across(1 / total, head_dim)
        mine = (split, row, head, tile)
        if sizes.splits > 1:
            out_ref.at[mine][...] = out
            weight_ref.at[mine][...] = top + jnp.log2(total)
        else:
            my_q[...] = out.astype(q_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_q.at[pl.ds(0, lines)], out_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)


def _zero_unseen(v_ref, start, low, high, warpgroup, warpgroups: int) -> None:
    """Zeros the values [block, H] of positions outside [low, high): they may be NaN, and 0 * NaN is NaN.  The warpgroups
    share the work."""
    block, head_dim = v_ref.shape
    for number, (i, j) in enumerate(product(range(0, block, LINES), range(0, head_dim, SLICE))):

        @pl.when(warpgroup == number % warpgroups)
        def _zero(i=i, j=j):
            part = v_ref.at[pl.ds(i, LINES), pl.ds(j, SLICE)]
            value = plgpu.layout_cast(part[...], TILE)
            at = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=TILE) + (start + i)
            part[...] = jnp.where((at >= low) & (at < high), value, jnp.zeros_like(value))


def _dot(a_ref, b_ref, columns: int) -> Array:
    """a [64, n] times b [n, columns], both in shared memory -> float32 in registers."""

    def multiply(sum_ref):
        plgpu.wgmma(sum_ref, a_ref, b_ref)
        return sum_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((LINES, columns), jnp.float32))


def _add_dot(out: Array, a_ref, b_ref, is_simulated: bool) -> Array:
    """out + a times b.  In place, but in the simulator, where every accumulator starts at zero."""
    if is_simulated:
        return out + _dot(a_ref, b_ref, out.shape[1])
    return pl.run_state(lambda sum_ref: plgpu.wgmma(sum_ref, a_ref, b_ref))(plgpu.WGMMAAccumulatorRef.init(out))  # pyright: ignore[reportReturnType]


def _across(line: Array, columns: int) -> Array:
    """[64] -> [64, columns]"""
    return lax.broadcast_in_dim(line, (LINES, columns), [0])


def _scaled(score: Array, score_scale: float, softcap: float) -> Array:
    """The softmax's exponent in base 2.  tanh(x) is 1 - 2 / (1 + exp(2 x)): the instruction is wrong by 5e-4, which a
    softcap multiplies by 50."""
    if not softcap:
        return score * (score_scale * LOG2_E)
    cap = softcap * LOG2_E
    return cap - (2 * cap) / (1 + jnp.exp2(score * (score_scale / softcap * 2 * LOG2_E)))


def _scratch(sizes: Sizes, data: Array) -> list:
    page_size, head_dim = data.shape[3:]
    swizzled = (plgpu.TilingTransform((8, SLICE)), plgpu.SwizzleTransform(128))

    def shared(*shape: int):
        return plgpu.SMEM(shape, data.dtype, transforms=swizzled)

    copies = 2 * max(1, sizes.block // page_size)  # of keys and of values
    return [
        shared(sizes.warpgroups, LINES, head_dim),
        shared(sizes.stages, sizes.block, head_dim),
        shared(sizes.stages, sizes.block, head_dim),
        shared(sizes.warpgroups, LINES, sizes.block),
        plgpu.SMEM((sizes.warpgroups, 2, LINES), jnp.int32),
        plgpu.Barrier(num_arrivals=2, num_barriers=sizes.warpgroups),
        plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.stages),
        plgpu.Barrier(num_arrivals=sizes.warpgroups, num_barriers=sizes.stages),
        plgpu.Barrier(num_arrivals=sizes.warpgroups),
    ]


def _seen(kv_len: Array, q_len: Array, window: Array, *, num_tiles: int, per_tile: int, group: int) -> Array:
    """The oldest and the newest position that each line sees: [R, tiles, 2, 64] int32; newest -1 = none."""
    line = lax.broadcasted_iota(jnp.int32, (1, 1, LINES), 2)
    query = lax.broadcasted_iota(jnp.int32, (1, num_tiles, 1), 1) * per_tile + lax.div(line, group)
    q_len, start = q_len[:, None, None], (kv_len - q_len)[:, None, None]
    is_query = (query < q_len) & (start + q_len > 0) & (line < per_tile * group)
    newest = jnp.where(is_query, start + query, -1)
    oldest = jnp.where(window > 0, jnp.maximum(newest - window + 1, 0), 0)
    return jnp.stack([oldest, newest], 2)


def _work(seen: Array, sizes: Sizes) -> Array:
    """What each program has to do: [R, tiles / warpgroups, splits, 4] int32, its first block, how many, and [low, high),
    the positions that its lines see."""
    oldest, newest = (seen[:, :, i].reshape(seen.shape[0], -1, sizes.warpgroups * LINES) for i in range(2))
    high = newest.max(-1, keepdims=True) + 1
    low = jnp.where(newest < 0, high, oldest).min(-1, keepdims=True)
    first = lax.div(low, sizes.block)
    blocks = lax.div(high + (sizes.block - 1), sizes.block) - first
    share = lax.div(blocks + (sizes.splits - 1), sizes.splits)
    before = lax.broadcasted_iota(jnp.int32, (1, 1, sizes.splits), 2) * share
    counts = jnp.clip(blocks - before, 0, share)
    return jnp.stack(jnp.broadcast_arrays(first + before, counts, low, high), -1)


def _fold(q: Array, kv_heads: int, *, per_tile: int, num_tiles: int, lines: int) -> Array:
    """[R, Q, N, H] -> [R, K, tiles, lines, H]; zeros where a tile has no query."""
    rows, queries, heads, head_dim = q.shape
    group = heads // kv_heads
    q = jnp.pad(q, ((0, 0), (0, num_tiles * per_tile - queries), (0, 0), (0, 0)))
    q = q.reshape(rows, num_tiles, per_tile, kv_heads, group, head_dim).transpose(0, 3, 1, 2, 4, 5)
    q = q.reshape(rows, kv_heads, num_tiles, per_tile * group, head_dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, lines - per_tile * group), (0, 0)))


def _unfold(out: Array, q: Array, per_tile: int) -> Array:
    """[R, K, tiles, lines, H] -> [R, Q, N, H], q's shape and dtype."""
    rows, kv_heads, num_tiles, _, head_dim = out.shape
    group = q.shape[2] // kv_heads
    out = out[:, :, :, : per_tile * group].reshape(rows, kv_heads, num_tiles * per_tile, group, head_dim)
    return out[:, :, : q.shape[1]].transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def _merge(parts: Array, weights: Array) -> Array:
    """parts [splits, ..., H] of a softmax and weights [splits, ...], the log2 of their sums -> [..., H]"""
    if parts.shape[0] == 1:
        return parts[0]
    share = jnp.exp2(weights - weights.max(0, keepdims=True))
    share = share / share.sum(0, keepdims=True)
    return (parts * share[..., None]).sum(0)


def _sizes(q: Array, data: Array, num_columns: int, tiles: Mapping[str, int]) -> Sizes:
    """The default block sizes for these shapes, with what `tiles` says in their place."""
    if unknown := sorted(set(tiles) - set(Sizes._fields)):
        raise ValueError(f"tiles {', '.join(unknown)} are none of {', '.join(Sizes._fields)}")
    rows, queries, heads, head_dim = q.shape
    kv_heads, page_size = data.shape[2:4]
    num_tiles = pl.cdiv(queries, LINES // (heads // kv_heads))
    warpgroups = tiles.get("warpgroups", min(2, num_tiles))
    block = tiles.get("block", 64)
    slots = (SHARED_MEMORY - _bytes(head_dim, Sizes(block, 0, warpgroups, 1))) // (block * head_dim * 4)
    programs = rows * kv_heads * pl.cdiv(num_tiles, warpgroups)
    splits = min(PROCESSORS // programs, num_columns * page_size // (4 * block), 32)
    sizes = Sizes(block, max(1, min(4, slots)), warpgroups, max(1, splits))._replace(**tiles)
    if block not in (64, 128) or (page_size % block and block % page_size) or min(sizes) < 1 or warpgroups > 2:
        raise ValueError(
            f"{sizes} must have a block of 64 or 128 that divides {page_size} tokens a page or is a multiple of it, "
            "at least one of each, and at most 2 warpgroups"
        )
    if (needed := _bytes(head_dim, sizes)) > SHARED_MEMORY:
        raise ValueError(f"{sizes} take {needed} bytes of shared memory at head dim {head_dim}, above {SHARED_MEMORY}")
    return sizes


def _bytes(head_dim: int, sizes: Sizes) -> int:
    """Shared memory of a program: queries and weights of each warpgroup, keys and values of each stage."""
    return 2 * LINES * sizes.warpgroups * (head_dim + sizes.block) + 4 * sizes.stages * sizes.block * head_dim


def _check(q: Array, data: Array) -> None:
    heads, head_dim = q.shape[2:]
    group = heads // data.shape[2]
    if q.dtype != jnp.bfloat16 or data.dtype != jnp.bfloat16:
        served = f"bfloat16 queries and pools, not {q.dtype} and {data.dtype}"
    elif head_dim not in (64, 128, 192, 256):
        served = f"head dims 64, 128, 192 and 256, not {head_dim}"
    elif group > LINES:
        served = f"at most {LINES} query heads a kv head, not {group}"
    else:
        return
    raise ValueError(f"pallas_mosaic_gpu serves {served}: choose pallas_triton or xla")


def _simulator():
    """ValueError where this jax has none."""
    try:
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        raise ValueError(f"the GPU simulator came with jax 0.11, this is {jax.__version__}") from None
    return InterpretGPUParams(detect_races=True)
