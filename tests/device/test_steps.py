"""The device contract, driven by hand-made plans: what a step may read, write and keep."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.hub import resolve
from jaxserve.catalogue import Catalogue
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.device.sharding import make_mesh
from jaxserve.models.loading import load_params, pack_matrices
from jaxserve.request import SamplingParams
from jaxserve.runner import Runner
from jaxserve.sched.plan import Call, Plan, Row, SlotLoad
from tests.tiny_model import write_tiny_model

T, NP, CHUNK, ROWS = 16, 40, 32, 2
PROMPT = tuple(int(i) for i in np.random.default_rng(0).integers(3, 400, 45))
PAGES = (1, 2, 3, 4, 5, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("steps") / "tiny")


def make_runner(folder: Path, tensor_parallel: int = 1, backend: str = "xla") -> Runner:
    mesh = make_mesh(jax.devices(), tensor_parallel)
    model, params = load_params(resolve(str(folder)), dtype="float32", mesh=mesh)
    if backend == "native":
        params = pack_matrices(model, params)
    scheduler = SchedulerConfig(
        slots=3, page_size=T, num_pages=NP, max_len=256, queue_limit=8, decode_buckets=(ROWS,),
        prefill_buckets=((ROWS, CHUNK),),
    )  # fmt: skip
    runner = Runner(params, Catalogue.of(model, scheduler, EngineConfig(slots=3), mesh=mesh, backend=backend))
    runner.warm_up()
    return runner


@pytest.fixture(scope="module", params=["xla", "native"])
def runner(folder: Path, request: pytest.FixtureRequest) -> Runner:
    if request.param == "native":
        pytest.importorskip("llvmlite", reason="the native kernels are written with llvmlite, which is not installed")
    return make_runner(folder, backend=request.param)


def load(slot: int, tokens=PROMPT, *, limit: int = 96, **fields) -> SlotLoad:
    params = SamplingParams(**({"temperature": 0} | fields))
    return SlotLoad(slot, tuple(tokens), len(tokens), limit, 0, (), params.seed or 0, params)


def start(runner: Runner, slot: int, pages=PAGES, tokens=PROMPT, chunk: int = CHUNK, **fields) -> int:
    """Load the slot, prefill the prompt in chunks, -> the first token."""
    loads = (load(slot, tokens, **fields),)
    drawn = ()
    for at in range(0, len(tokens), chunk):
        q_len = min(chunk, len(tokens) - at)
        row = Row(0, 0, slot, at, q_len, pages, takes_token=at + q_len == len(tokens))
        drawn = runner.dispatch(Plan(0, loads, Call((row,), ROWS, CHUNK))).result().rows[0].token_ids
        loads = ()
    return drawn[0]


def decode(runner: Runner, slot: int, count: int, pages=PAGES) -> list[int]:
    """`count` steps, each dispatched before the one before it is read."""
    plan = Plan(1, (), None, Call((Row(0, 0, slot, -1, 1, pages),), ROWS, 1))
    pending = [runner.dispatch(plan) for _ in range(count)]
    return [token for step in pending for token in step.result().rows[0].token_ids]


def poison(runner: Runner, pages) -> None:
    """NaN in these pages of every layer."""
    layers = runner.pool.data.shape[0] // NP
    rows = jnp.array([layer * NP + page for layer in range(layers) for page in pages])
    runner.pool = runner.pool.replace(data=runner.pool.data.at[rows].set(jnp.nan))


def test_scrap_page_is_never_read(runner: Runner) -> None:
    """NaN in every page that the row does not own, in its own unwritten ones, and in the scrap page."""
    poison(runner, [page for page in range(NP) if page not in PAGES])
    want = [start(runner, 0), *decode(runner, 0, 20)]
    poison(runner, range(NP))
    assert [start(runner, 0), *decode(runner, 0, 20)] == want


def test_chunk_borders_and_a_used_slot_change_no_token(runner: Runner) -> None:
    want = [start(runner, 0), *decode(runner, 0, 12)]
    start(runner, 2, presence_penalty=2.0, logit_bias={5: 50.0}, temperature=2.0, seed=4)
    decode(runner, 2, 5)
    for chunk in (7, 16, 31):
        assert [start(runner, 2, chunk=chunk), *decode(runner, 2, 12)] == want


def test_a_reused_page_and_slot_forget_a_step_in_flight(runner: Runner) -> None:
    """A row's unread steps write its pages; both are given away before anybody reads; the order on the device holds."""
    other = PROMPT[::-1][:20]
    want = [start(runner, 1, (11, 12, 13), other), *decode(runner, 1, 12, (11, 12, 13))]
    start(runner, 0)
    stale = Plan(1, (), None, Call((Row(0, 0, 0, -1, 1, PAGES),), ROWS, 1))
    unread = [runner.dispatch(stale) for _ in range(3)]
    assert [start(runner, 0, (4, 3, 1), other), *decode(runner, 0, 12, (4, 3, 1))] == want
    assert all(step.result().rows[0].token_ids for step in unread)


def test_a_row_at_its_limit_is_inert(runner: Runner) -> None:
    first = start(runner, 0, limit=len(PROMPT) + 4)
    drawn = decode(runner, 0, 8)
    assert len([first, *drawn]) == 4  # the rest took no token
    before = np.array(runner.pool.data).view(np.int32)  # a copy, as bits: the pool holds NaN
    decode(runner, 0, 2)
    after = np.array(runner.pool.data).view(np.int32)
    changed = {int(row) % NP for row in np.unique(np.nonzero(before != after)[0])}
    assert changed <= {0}, f"an inert row wrote pages {changed}"


def test_nan_ends_the_row_and_spares_its_mate(runner: Runner) -> None:
    want = [start(runner, 1, (11, 12, 13, 14, 15)), *decode(runner, 1, 3, (11, 12, 13, 14, 15))]
    start(runner, 0)
    start(runner, 1, (11, 12, 13, 14, 15))
    poison(runner, [2])
    rows = (Row(0, 0, 0, -1, 1, PAGES), Row(1, 0, 1, -1, 1, (11, 12, 13, 14, 15)))
    broken, mate = runner.dispatch(Plan(1, (), None, Call(rows, ROWS, 1))).result().rows
    assert broken.is_nan
    assert not mate.is_nan
    assert mate.token_ids == (want[1],)


def test_donated_inputs_are_deleted_and_the_pool_is_not_copied(runner: Runner) -> None:
    pool, slots = runner.pool.data, runner.slots.tokens
    start(runner, 0)
    assert pool.is_deleted()
    assert slots.is_deleted()
    shape = ",".join(map(str, runner.pool.data.shape))
    for name, program in runner.programs.compiled.items():
        if name.startswith(("decode", "prefill")):
            copies = [line for line in program.as_text().splitlines() if re.search(rf"f32\[{shape}\]\S* copy\(", line)]
            assert not copies, f"{name} copies the pool: {copies[0]}"


def test_prefix_pages_computed_by_another_slot_serve(runner: Runner) -> None:
    """A prefix hit: the slot is loaded with the whole prompt, prefill begins behind the shared pages."""
    want = [start(runner, 0), *decode(runner, 0, 10)]
    shared = (*PAGES[:2], 21, 22, 23, 24)  # two full pages of 16
    row = Row(0, 0, 2, 32, len(PROMPT) - 32, shared)
    first = runner.dispatch(Plan(0, (load(2),), Call((row,), ROWS, CHUNK))).result().rows[0].token_ids[0]
    assert [first, *decode(runner, 2, 10, shared)] == want


def test_two_devices_give_the_same_tokens(folder: Path, runner: Runner) -> None:
    want = [start(runner, 0), *decode(runner, 0, 16)]
    split = make_runner(folder, tensor_parallel=2)
    assert [start(split, 0), *decode(split, 0, 16)] == want


def test_no_program_but_the_compiled_ones_runs(runner: Runner) -> None:
    row = Row(0, 0, 0, 0, 5, PAGES)
    with pytest.raises(KeyError, match="prefill 1x16"):
        runner.dispatch(Plan(0, (load(0),), Call((row,), 1, 16)))


def test_page_ids_are_checked_on_the_host(runner: Runner) -> None:
    row = Row(0, 0, 0, 0, 5, (NP,))
    with pytest.raises(AssertionError, match="page id"):
        runner.dispatch(Plan(0, (load(0),), Call((row,), ROWS, CHUNK)))
