"""The CPU's own paged attention: that no bit of a query depends on its call, odd head dims, narrower vector registers,
long rows, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from tests.kernels.cases import NOT_RUN, SHAPES, TOLERANCE, Case

if "any" in NOT_RUN["native"]:
    pytest.skip(NOT_RUN["native"]["any"], allow_module_level=True)
native = pytest.importorskip("pallas_kernels.paged_attention.native")

LENGTHS = [333, 40, 1000, 0, 64, 65, 1, 512, 700]


def attend(case: Case, rows: slice = slice(None), **changes: np.ndarray) -> np.ndarray:
    """Under a jit of its own, so that a patched kernel is traced anew."""
    q, table, kv_len, q_len = (
        np.asarray(changes.get(name, getattr(case, name)))[rows] for name in ("q", "table", "kv_len", "q_len")
    )
    function = partial(
        paged_attention,
        num_pages=case.num_pages,
        scale_factor=case.scale_factor,
        softcap=case.softcap,
        backend="native",
    )
    return np.asarray(jax.jit(function)(q, case.data, None, case.layer, table, kv_len, q_len, window=case.window))


@pytest.mark.parametrize("shape", ["smollm2", "gemma2"])
@pytest.mark.parametrize("queries", [1, 4])
def test_alone_or_with_mates_the_same_bits(queries: int, shape: str) -> None:
    case = Case(shape, queries=queries, page_size=64, kv_len=LENGTHS)
    together = attend(case)
    np.testing.assert_allclose(together, case.oracle(), rtol=0, atol=TOLERANCE["float32"])
    for row in range(len(LENGTHS)):
        np.testing.assert_array_equal(attend(case, slice(row, row + 1))[0], together[row])
    many = np.tile(np.arange(len(LENGTHS)), 4)  # enough rows that their heads go together
    repeated = {name: getattr(case, name)[many] for name in ("q", "table", "kv_len", "q_len")}
    np.testing.assert_array_equal(attend(case, **repeated), together[many])


@pytest.mark.parametrize("shape", ["smollm2", "gemma2"])
@pytest.mark.parametrize("queries", [5, 100])
def test_prefilled_verified_or_decoded_the_same_bits(queries: int, shape: str) -> None:
    """Query i of a call of several has the bits of a call of its own, so it shows no chunk's border and no draft."""
    case = Case(shape, queries=queries, page_size=32, kv_len=[333, 169, 1000, 128, 513])
    together = attend(case)
    np.testing.assert_allclose(together, case.oracle(), rtol=0, atol=TOLERANCE["float32"])
    for i in range(0, queries, max(1, queries // 7)):
        alone = attend(
            case, q=case.q[:, i : i + 1], kv_len=case.kv_len - (queries - 1) + i, q_len=np.minimum(case.q_len, 1)
        )
        np.testing.assert_array_equal(alone[:, 0], together[:, i])


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("head_dim", [8, 16, 20, 80, 96])
def test_any_head_dim_in_registers_of_any_width(head_dim: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if lanes > native.host().lanes:
        pytest.skip(f"this CPU's registers hold {native.host().lanes}")
    narrow = replace(native.host(), lanes=lanes, registers=32 if lanes == 16 else 16)
    monkeypatch.setattr(native, "host", lambda: narrow)
    monkeypatch.setitem(SHAPES, "odd", (10, 2, head_dim, 70, 30.0))
    case = Case("odd", queries=3, kv_len=[200, 0, 2, 17, 129])
    np.testing.assert_allclose(attend(case), case.oracle(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("queries", [1, 3, 21, 22, 70])
@pytest.mark.parametrize("window", [0, 1, 16, 63, 64, 65, 5000])
def test_windows(window: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "windowed", (6, 2, 16, window, 0.0))
    case = Case("windowed", queries=queries, kv_len=[200, 17, 129, 64, 128, 1])
    if window:
        for row, (kv_len, q_len) in enumerate(zip(case.kv_len, case.q_len, strict=True)):
            for position in range(max(0, kv_len - q_len - window + 1)):  # nobody may look there
                page = case.layer * case.num_pages + case.table[row, position // 16]
                case.data[page, :, :, position % 16] = np.nan
    np.testing.assert_allclose(attend(case), case.oracle(), rtol=0, atol=TOLERANCE["float32"])


def test_scores_far_apart_and_a_long_row() -> None:
    case = Case("smollm2", queries=2, page_size=64, kv_len=[3000, 1])
    case.q *= 60  # nearly every weight is 0, whatever the highest score so far
    np.testing.assert_allclose(attend(case), case.oracle(), rtol=0, atol=1e-4)


def test_nan_of_a_seen_position_comes_out() -> None:
    case = Case("smollm2", queries=1, kv_len=[100])
    case.data[case.layer * case.num_pages + case.table[0, 2], 0, 1, 5] = np.nan
    out = attend(case).reshape(3, 3, 64)  # a kv head's query heads
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize(
    ("q", "pool", "scale"),
    [
        ("bfloat16", "bfloat16", False),
        ("bfloat16", "float32", False),
        ("float32", "bfloat16", False),
        ("float32", "int8", True),
        ("float32", "float8_e4m3fn", True),
    ],
)
def test_refuses_other_dtypes_when_it_is_traced(q: str, pool: str, scale: bool) -> None:
    def shaped(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    attend = partial(paged_attention, num_pages=2, scale_factor=1.0, window=0, softcap=0.0, backend="native")
    with pytest.raises(ValueError, match=f"float32 pools and queries alone, got {pool} and {q}"):
        jax.eval_shape(
            attend, shaped((1, 1, 2, 16), q), shaped((2, 2, 1, 32, 16), pool),
            shaped((2, 2, 1, 32), "float32") if scale else None, 0, shaped((1, 1), "int32"), shaped((1,), "int32"),
            shaped((1,), "int32"),
        )  # fmt: skip
