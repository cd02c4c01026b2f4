"""The Triton kernel, interpreted: split rows, block sizes, long rows, devices that share the heads; and its refusals.
That it meets the contract on real models' layouts is in test_paged_attention.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import gpu
from tests.kernels.cases import TOLERANCE, Case

BACKEND = "pallas_triton"


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_splitting_a_row_changes_only_rounding(splits: int) -> None:
    """With and without a window, one query and several; rows shorter than a split, idle rows and padded queries too."""
    for shape, queries in (("smollm2", 1), ("gemma2", 4)):
        case = Case(shape, queries=queries)
        got = case.run(BACKEND, tiles={"splits": splits, "block": 16})
        np.testing.assert_allclose(got, case.oracle(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("page_size", "tiles"),
    [
        (64, {"block": 16}),  # a part of a page
        (16, {"block": 128, "queries_per_block": 5}),  # eight pages; tiles that the 32 queries do not fill
        (32, {"block": 32, "queries_per_block": 32, "splits": 2}),
    ],
)
def test_block_sizes_change_only_rounding(page_size: int, tiles: Mapping[str, int]) -> None:
    case = Case("gemma3", queries=32, page_size=page_size)
    np.testing.assert_allclose(case.run(BACKEND, tiles=tiles), case.oracle(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize(("queries", "kv_heads", "group", "size"), [(1, 2, 3, 1), (32, 1, 4, 5), (7, 3, 3, 7)])
def test_every_line_of_the_output_belongs_to_one_program_and_none_lies_beyond(
    queries: int, kv_heads: int, group: int, size: int
) -> None:
    """A store past the end, which a GPU would do, is dropped by the interpreter: so the lines are counted here."""
    sizes = gpu.Sizes(block=16, queries_per_block=size, splits=1, num_warps=4, num_stages=2)
    plan = gpu._Plan(queries, group, kv_heads, 16, 1, 1.0, 0.0, sizes)

    def kernel(out_ref):
        my = gpu._block(jnp.int32(queries), jnp.int32(queries), jnp.int32(0), plan)
        out_ref[...] = jnp.where(my.is_real, my.line, -1)

    grid = (-(-queries // size), kv_heads, 1)
    lines = pl.pallas_call(
        kernel, grid=grid, out_shape=jax.ShapeDtypeStruct((*grid, plan.folded), jnp.int32), interpret=True,
        out_specs=pl.BlockSpec((None, None, None, plan.folded), lambda tile, head, split: (tile, head, split, 0)),
    )()  # fmt: skip
    lines = np.sort(np.asarray(lines).ravel())
    np.testing.assert_array_equal(lines[lines >= 0], np.arange(queries * kv_heads * group))


def long_rows(pool_dtype: str = "float32", window: int = 0) -> dict:
    """Rows of 3,000, 0, 70 and 1 positions, 48 pages of 64 each, NaN where nobody may look.  12 heads to 4."""
    rng = np.random.default_rng(0)
    kv_len, columns, num_pages = np.array([3000, 0, 70, 1], np.int32), 48, 4 * 48 + 1
    table = (1 + rng.permutation(4 * columns)).reshape(4, columns).astype(np.int32)
    data = rng.standard_normal((2 * num_pages, 2, 4, 64, 32)).astype(np.float32)
    data[:num_pages] = data[num_pages] = np.nan  # layer 0, and the scrap page of layer 1
    for row, length in enumerate(kv_len):
        pages = num_pages + table[row]
        data[pages[-(-length // 64) :]] = np.nan
        data[pages[length // 64], :, :, length % 64 :] = np.nan
        for position in range(length - window if window else 0):
            data[pages[position // 64], :, :, position % 64] = np.nan
    return {
        "q": jnp.asarray(rng.standard_normal((4, 1, 12, 32)), jnp.float32), "data": jnp.asarray(data, pool_dtype),
        "scale": None, "layer": jnp.int32(1), "page_table": table, "kv_len": kv_len, "q_len": np.minimum(kv_len, 1),
        "num_pages": num_pages, "scale_factor": 0.5, "window": jnp.int32(window), "softcap": 0.0,
    }  # fmt: skip


def attend(problem: dict, backend: str, **more) -> np.ndarray:
    static = ("num_pages", "scale_factor", "softcap")
    function = partial(paged_attention, **{name: problem[name] for name in static}, backend=backend, **more)
    out = jax.jit(function)(**{name: value for name, value in problem.items() if name not in static})
    return np.asarray(out.astype(jnp.float32))


@pytest.mark.parametrize(
    ("pool_dtype", "window", "tiles"),
    [("float32", 0, None), ("float32", 500, {"splits": 7}), ("bfloat16", 500, {"splits": 1})],
)
def test_long_rows_and_short_ones_together(pool_dtype: str, window: int, tiles: Mapping[str, int] | None) -> None:
    """float32 queries meet a narrower pool in float32, as the reference does."""
    problem = long_rows(pool_dtype, window)
    want = attend(problem, "reference")
    assert np.abs(want[0]).max() > 0.01
    got = attend(problem, BACKEND, interpret=True, tiles=tiles)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE["float32"])


def test_devices_that_share_the_heads_agree_with_one_that_has_them_all() -> None:
    problem = long_rows()
    want = attend(problem, BACKEND, interpret=True)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, pool = Spec(None, None, "tp"), Spec(None, None, "tp")
    arrays = ("q", "data", "layer", "page_table", "kv_len", "q_len", "window")

    def local(q, data, layer, page_table, kv_len, q_len, window):
        return paged_attention(
            q, data, None, layer, page_table, kv_len, q_len, num_pages=problem["num_pages"], scale_factor=0.5,
            window=window, softcap=0.0, backend=BACKEND, interpret=True,
        )  # fmt: skip

    body = jax.shard_map(local, mesh=mesh, in_specs=(heads, pool, *(Spec(),) * 5), out_specs=heads, check_vma=False)
    got = jax.jit(body)(*(problem[name] for name in arrays))
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-6)


def traced(
    *,
    pages: int = 64,
    page_size: int = 64,
    head_dim: int = 128,
    kv_heads: int = 8,
    heads: int = 32,
    dtype: str = "bfloat16",
    tiles: Mapping[str, int] | None = None,
) -> jax.ShapeDtypeStruct:
    """Shapes alone: nothing of the pool is allocated."""

    def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    lines = (pages, 2, kv_heads, page_size)
    function = partial(
        paged_attention, num_pages=pages, scale_factor=0.1, softcap=0.0, backend=BACKEND, tiles=tiles, interpret=True
    )
    q = array(8, 1, heads, head_dim, dtype="float64" if dtype == "float64" else "bfloat16")
    scale = array(*lines, dtype="float32") if jnp.dtype(dtype).itemsize == 1 else None
    return jax.eval_shape(
        function, q, array(*lines, head_dim, dtype=dtype), scale, array(), array(8, 16), array(8), array(8),
        window=array(),
    )  # fmt: skip


GIB = 2**30 // (2 * 8 * 64 * 128)  # pages of one byte an element


@pytest.mark.parametrize("pages", [2 * GIB + 1, 3 * GIB, 4 * GIB])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_an_eight_bit_pool_between_two_and_four_gib_is_refused(dtype: str, pages: int) -> None:
    """Triton's 32-bit offsets would overflow there.  The error names the sizes on both sides, and they are served."""
    with pytest.raises(ValueError, match=f"at most {2 * GIB} or at least {4 * GIB + 1}"):
        traced(dtype=dtype, pages=pages)
    for enough in (2 * GIB, 4 * GIB + 1):
        assert traced(dtype=dtype, pages=enough).shape == (8, 1, 32, 128)
    assert traced(pages=pages).shape == (8, 1, 32, 128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 80}, "head dim 80 .* padded to 16, 32, 64, 128"),
        ({"dtype": "uint8"}, "uint8"),
        ({"pages": 2**21}, "2147483648 rows of 128 is past the int32"),
        ({"tiles": {"pages_per_block": 2}}, "pages_per_block .* block, queries_per_block, splits"),
        ({"tiles": {"block": 48}}, "block=48"),
        ({"tiles": {"block": 64}, "page_size": 48}, "block=64 .* page size 48"),
        ({"tiles": {"splits": 0}}, "'splits': 0"),
        ({"tiles": {"queries_per_block": 0}}, "'queries_per_block': 0"),
        ({"tiles": {"queries_per_block": 128}}, "128 queries a block x 4 query heads"),
        ({"tiles": {"num_warps": 3}}, "num_warps=3"),
        ({"heads": 512, "kv_heads": 1}, "1 queries a block x 512 query heads"),
    ],
)
def test_refuses_what_it_says_it_refuses(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        traced(**change)
