"""The TPU kernel in the TPU simulator: no read before its DMA has arrived, none of a buffer being overwritten, none out
of bounds.  Taking a wait or a buffer away is noticed, so the silence means something."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator  # tells what it found nowhere else
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu
from tests.kernels.cases import TOLERANCE, Case, pad_head_dim


@pytest.fixture(autouse=True)
def _fresh_simulator() -> Iterator[None]:
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


def simulate(case: Case, tiles: dict[str, int]) -> tuple[np.ndarray, bool]:
    """-> the attention [R, Q, N, H] float32, and whether the simulator saw a race."""
    q, data = pad_head_dim(case.q, 128), pad_head_dim(case.data, 128)
    attend = partial(
        tpu.paged_attention,
        num_pages=case.num_pages,
        scale_factor=case.scale_factor,
        softcap=case.softcap,
        tiles=tiles,
        # Eager: without its wait a DMA would never run in the other mode, and there would be no race to see.
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
    )
    out = jax.jit(attend)(
        q, data, case.scale, jnp.int32(case.layer), case.table, case.kv_len, case.q_len, window=jnp.int32(case.window)
    )
    return np.asarray(out.astype(jnp.float32))[..., : case.q.shape[-1]], simulator.races.races_found


SMALL_BLOCKS = {"pages_per_block": 8}  # 128 positions of pages of 16
CASES = {
    "decode": (lambda: Case("smollm2", queries=1), SMALL_BLOCKS),
    "verify with a window": (lambda: Case("gemma3", queries=4, dtype="bfloat16"), SMALL_BLOCKS),
    "prefill, three tiles a row": (lambda: Case("mha", queries=20), SMALL_BLOCKS | {"queries_per_block": 8}),
    "eight-bit pool": (lambda: Case("mha", queries=1, page_size=32, pool_dtype="int8"), {"pages_per_block": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_simulator_sees_no_race_and_the_right_numbers(name: str) -> None:
    make, tiles = CASES[name]
    case = make()
    got, has_race = simulate(case, tiles)
    assert not has_race
    np.testing.assert_allclose(got, case.oracle(), rtol=0, atol=TOLERANCE[case.dtype.name])


def test_a_page_that_no_query_sees_is_not_fetched() -> None:
    """Page ids before the window and past the row's end lie outside the pool: the simulator would raise."""
    case = Case("gemma3", queries=4, kv_len=(700, 0, 90))
    for row, kv_len in enumerate(case.kv_len):
        pages = np.arange(case.table.shape[1])
        seen = (pages >= (kv_len - 4 - case.window + 1) // 16) & (pages < -(-kv_len // 16))
        case.table[row, ~seen] = 1 << 20
    got, has_race = simulate(case, SMALL_BLOCKS)
    assert not has_race
    np.testing.assert_allclose(got, case.oracle(), rtol=0, atol=TOLERANCE["float32"])


def test_a_wait_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All waits but the page table's: without that one there is no telling which pages are read."""

    def wait_for_table_only(copy) -> None:
        if copy.dst_ref.dtype == jnp.int32:
            copy.wait()

    monkeypatch.setattr(tpu, "_wait", wait_for_table_only)
    assert simulate(Case("mha", queries=1), SMALL_BLOCKS)[1]


def test_a_buffer_overwritten_while_in_use_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer for all blocks: the rows are long enough that blocks of two rows meet in it."""
    monkeypatch.setattr(tpu, "_next_buffer", lambda buffer: buffer)
    case = Case("mha", queries=1)
    got, has_race = simulate(case, SMALL_BLOCKS)
    assert has_race or not np.allclose(got, case.oracle(), rtol=0, atol=TOLERANCE["float32"])
