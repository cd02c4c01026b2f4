"""What the TPU kernel promises beside the contract all backends share: its block sizes, its place in a sharded scan, its
refusals.  Interpreted on the CPU."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import tpu
from tests.kernels.cases import TOLERANCE, Case, pad_head_dim


def test_rows_of_many_blocks_and_of_more_pages_than_one_line_of_the_table() -> None:
    """2,100 positions: 17 blocks of 128 through three buffers, and the second 128 columns of the page table."""
    case = Case("gemma3", queries=2, kv_len=(2100, 0, 0, 5, 130))
    case.window = 0
    got = case.run("pallas_tpu", tiles={"pages_per_block": 8})
    np.testing.assert_allclose(got, case.oracle(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("queries_per_block", [8, pytest.param(1, marks=pytest.mark.full), 20])
def test_queries_of_a_row_may_be_cut_into_tiles_anywhere(queries_per_block: int) -> None:
    """20 queries in tiles of 8: the last tile is not full, and a short row's tiles are idle."""
    case = Case("smollm2", queries=20)
    case.window = 50
    got = case.run("pallas_tpu", tiles={"queries_per_block": queries_per_block, "pages_per_block": 8})
    np.testing.assert_allclose(got, case.oracle(), rtol=0, atol=TOLERANCE["float32"])


def test_the_order_of_rows_changes_no_bit() -> None:
    case = Case("smollm2", queries=4)
    want, order = case.run("pallas_tpu"), np.array([3, 1, 4, 0, 2])
    case.q, case.table, case.kv_len, case.q_len = (
        array[order] for array in (case.q, case.table, case.kv_len, case.q_len)
    )
    np.testing.assert_array_equal(case.run("pallas_tpu"), want[order])


def test_layers_of_one_scan_over_sharded_heads() -> None:
    """Four kv heads on four devices, one each; layer and window are traced."""
    case = Case("mha", queries=4)
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    heads, pool = Spec(None, None, "tp", None), Spec(None, None, "tp", None, None)
    data = pad_head_dim(case.data, 128)
    windows = (0, 30)

    def attend(q, data, *rows):
        def layer(_, traced):
            index, window = traced
            return None, paged_attention(
                q, data, None, index, *rows, num_pages=case.num_pages, scale_factor=case.scale_factor,
                window=window, softcap=0.0, backend="pallas_tpu", interpret=True,
            )  # fmt: skip

        return jax.lax.scan(layer, None, (jnp.array([case.layer] * 2, jnp.int32), jnp.array(windows, jnp.int32)))[1]

    rows = (case.table, case.kv_len, case.q_len)
    specs = (heads, pool, *(Spec(),) * len(rows))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=Spec(None, *heads), check_vma=False)
    got = jax.jit(sharded)(case.q, data, *rows)
    for out, window in zip(got, windows):
        case.window = window
        np.testing.assert_allclose(out, case.oracle(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_dots_are_exact_for_float32_and_one_pass_for_narrower(dtype: str, precision: str) -> None:
    text = str(jax.make_jaxpr(partial(trace, tiles={}))(*call_shapes(dtype=dtype)))
    dots = text.count("dot_general[")
    assert dots > 0
    assert text.count(f"precision=(Precision.{precision}, Precision.{precision})") == dots
    assert text.count("preferred_element_type=float32") == dots


@pytest.mark.parametrize(
    ("head_dim", "page_size", "dtype", "tiles", "words"),
    [
        (64, 16, "float32", {}, "head dim 64 must be a multiple of 128"),
        (128, 16, "int8", {}, "16 tokens a page of int8 must be a multiple of 32"),
        (128, 16, "bfloat16", {"pages_per_block": 12}, "12 pages of 16 tokens make a block of 192 positions"),
        (128, 16, "bfloat16", {"queries_per_block": 0}, "1 or more"),
        (128, 16, "bfloat16", {"rows": 4}, "'rows'"),
        (128, 64, "bfloat16", {"pages_per_block": 1024}, "MiB of VMEM, above 48"),
    ],
)
def test_refuses_what_a_tpu_cannot_serve(
    head_dim: int, page_size: int, dtype: str, tiles: dict[str, int], words: str
) -> None:
    shapes = call_shapes(dtype=dtype, head_dim=head_dim, page_size=page_size)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(partial(trace, tiles=tiles), *shapes)


def trace(q, data, scale, number, table, lengths, *, tiles: dict[str, int]) -> jax.Array:
    return tpu.paged_attention(
        q, data, scale, number, table, lengths, lengths,
        num_pages=4, scale_factor=1.0, window=number, softcap=0.0, tiles=tiles,
    )  # fmt: skip


def call_shapes(*, dtype: str, head_dim: int = 128, page_size: int = 16) -> tuple:
    """q, data, scale, a number, page table, lengths; dtype is the pool's."""
    data = jax.ShapeDtypeStruct((8, 2, 2, page_size, head_dim), dtype)
    scale = jax.ShapeDtypeStruct(data.shape[:-1], jnp.float32) if dtype == "int8" else None
    q = jax.ShapeDtypeStruct((2, 1, 4, head_dim), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    number, table, lengths = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((), (2, 2), (2,)))
    return q, data, scale, number, table, lengths
