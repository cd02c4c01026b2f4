"""The product with a weight in panels: against float64, to the same bits in any batch, and under every kind of crowd."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import panel_matmul

pytest.importorskip("llvmlite", reason="the native kernels are written with llvmlite, which is not installed")

from pallas_kernels.panel_matmul import panel_width

WIDTH = panel_width()
# M, I, O: one row and many; rows that fill no tile; inputs that fill no chunk, and one alone; outputs that fill no panel.
SHAPES = [
    (1, 32, WIDTH), (1, 576, 3072), (3, 33, 2 * WIDTH + 1), (4, 192, 7), (7, 3, 5), (8, 576, 960), (13, 100, 500),
    (16, 1, 1), (31, 193, WIDTH - 1), (32, 1536, 576), (70, 65, 64), (300, 200, 100),
]  # fmt: skip


def arrays(rows: int, inputs: int, outputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> x [M, I], w [I, O], and w as the second of three layers of panels; the other two, and unused columns, are NaN."""
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, inputs), (inputs, outputs)))
    panels = -(-outputs // WIDTH)
    padded = np.full((inputs, panels * WIDTH), np.nan, np.float32)
    padded[:, :outputs] = w
    values = np.full((3, panels, inputs, WIDTH), np.nan, np.float32)
    values[1] = padded.reshape(inputs, panels, WIDTH).transpose(1, 0, 2)
    return x, w, values


def run(x: np.ndarray, panels: np.ndarray, outputs: int, backend: str = "native") -> np.ndarray:
    product = jax.jit(lambda x, panels: panel_matmul(x, panels, 1, outputs=outputs, backend=backend))
    return np.asarray(product(x, panels))


@pytest.mark.parametrize("backend", ["native", "xla"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_float64(shape: tuple[int, int, int], backend: str) -> None:
    """Within float32's rounding of sums of this length, and without a look at a column that is none."""
    x, w, panels = arrays(*shape)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(w) * np.finfo(np.float32).eps * 4
    assert (np.abs(run(x, panels, shape[2], backend) - exact) <= bound).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_anywhere(shape: tuple[int, int, int]) -> None:
    x, _, panels = arrays(*shape)
    together = run(x, panels, shape[2])
    assert (run(x[::-1].copy(), panels, shape[2])[::-1] == together).all()
    for row in {0, len(x) // 2, len(x) - 1}:
        assert (run(x[row : row + 1], panels, shape[2])[0] == together[row]).all()


def test_calls_at_the_same_time_do_not_meet() -> None:
    """The team has one call at a time: the others do their work alone, and all are right."""
    cases = [arrays(8, 576, 960, seed=seed) for seed in range(4)]
    wanted = [run(x, panels, 960) for x, _, panels in cases]
    product = jax.jit(lambda x, panels: panel_matmul(x, panels, 1, outputs=960, backend="native"))
    wrong: list[tuple[int, int]] = []

    def call_often(index: int) -> None:
        x, _, panels = cases[index]
        wrong.extend((index, turn) for turn in range(300) if (np.asarray(product(x, panels)) != wanted[index]).any())

    threads = [threading.Thread(target=call_often, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_without_an_order_inside_one_program() -> None:
    """XLA may run them on its own threads side by side."""
    cases = [arrays(8, 192, 500, seed=seed) for seed in range(12)]
    xs, panels = [case[0] for case in cases], [case[2] for case in cases]

    def products(xs: list[jax.Array], panels: list[jax.Array]) -> list[jax.Array]:
        return [panel_matmul(x, p, 1, outputs=500, backend="native") for x, p in zip(xs, panels, strict=True)]

    together = jax.jit(products)
    for _ in range(100):
        for got, x, p in zip(together(xs, panels), xs, panels, strict=True):
            assert (np.asarray(got) == run(x, p, 500)).all()


def test_helpers_that_sleep_are_woken() -> None:
    x, _, panels = arrays(8, 576, 960)
    wanted = run(x, panels, 960)
    for pause in (0.0, 0.001, 0.003, 0.02, 0.1):
        threading.Event().wait(pause)
        assert (run(x, panels, 960) == wanted).all()


def test_wrong_shapes_are_refused_with_their_numbers() -> None:
    x, _, panels = arrays(2, 32, 500)
    with pytest.raises(ValueError, match=r"got \(2, 31\) and"):
        panel_matmul(jnp.asarray(x[:, 1:]), jnp.asarray(panels), 1, outputs=500, backend="native")
    with pytest.raises(ValueError, match="do not hold outputs=700"):
        panel_matmul(jnp.asarray(x), jnp.asarray(panels), 1, outputs=700, backend="native")
    with pytest.raises(ValueError, match="must be float32, got bfloat16"):
        panel_matmul(jnp.asarray(x, jnp.bfloat16), jnp.asarray(panels), 1, outputs=500, backend="native")
