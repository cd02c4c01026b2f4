"""How long decode and verify calls take, measured once the programs are compiled and before anything is served.

On rows of a realistic length, in the runner's own pool and slots; whatever that leaves behind is never read."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import jax
import numpy as np

from jaxserve.config import StepTime
from jaxserve.device.slots import fill_slots
from jaxserve.device.speculate import Proposed
from jaxserve.device.state import RowFlag
from jaxserve.device.steps import HEAD
from jaxserve.runner import Runner
from jaxserve.sched.plan import Call

CONTEXT = 256  # tokens a row holds, or half of max_len
ROUNDS = 3


def measure_steps(runner: Runner) -> tuple[StepTime, ...]:
    """Of every decode and verify program, the median of a few runs.  The programs take turns, so that a machine that is
    busy for a while slows all of them alike."""
    scheduler = runner.catalogue.scheduler
    shapes = [*((rows, 0) for rows in scheduler.decode_buckets), *scheduler.verify_calls]
    seconds: dict[tuple[int, int], list[tuple[float, float]]] = {shape: [] for shape in shapes}
    for turn in range(1 + ROUNDS):
        for shape, times in seconds.items():
            took = _time_once(runner, *shape)
            if turn:  # the first run of a program also pays for its memory
                times.append(took)
    runner.slots = runner.catalogue.new_slots()
    found = []
    for (rows, drafts), times in seconds.items():
        propose, verify = (statistics.median(part) for part in zip(*times, strict=True))
        found.append(StepTime(rows=rows, drafts=drafts, propose=propose, verify=verify))
    return tuple(found)


def _time_once(runner: Runner, rows: int, drafts: int) -> tuple[float, float]:
    """-> seconds to propose, seconds of the rest."""
    _fill_slots(runner)
    packed, call = _packed(runner, rows, drafts), Call((), rows, 1 + drafts)
    proposed, began = None, time.perf_counter()
    if drafts:
        jax.block_until_ready(runner.propose(rows, packed))
        # What it has found may be little; what is timed is a call in which every row has all of its drafts.
        most = runner.catalogue.scheduler.num_drafts
        full = replace(Proposed.empty(rows, most), count=np.full((rows,), drafts, np.int32))
        proposed = jax.device_put(full, runner.catalogue.replicated)
    middle = time.perf_counter()
    runner.run_decode(call, packed, proposed)
    return middle - began, time.perf_counter() - middle


def _fill_slots(runner: Runner) -> None:
    """Every slot holds so many tokens, all of them different, and may take more.

    A row of one token again and again would be slow for no reason that a request has: a first token's keys outweigh all
    others, so that the softmax of the rest is denormal."""
    slots, max_len = runner.slots, runner.catalogue.scheduler.max_len
    length = min(CONTEXT, max_len // 2)
    vocab = runner.catalogue.slot_shape.vocab
    tokens = np.arange(slots.tokens.size, dtype=np.int32).reshape(slots.tokens.shape) * 7919 % vocab
    filled = replace(fill_slots(slots, length=length, limit=max_len), tokens=tokens)
    runner.slots = jax.device_put(filled, runner.catalogue.replicated)
    jax.block_until_ready(runner.slots)


def _packed(runner: Runner, rows: int, drafts: int) -> np.ndarray:
    """Greedy rows, each in its own slot and, as far as the pool goes, on its own pages."""
    catalogue = runner.catalogue
    packed = np.zeros((rows, catalogue.packed_columns), np.int32)
    packed[:, 0], packed[:, 1], packed[:, 3] = range(rows), 1 + drafts, int(RowFlag.TAKES_TOKEN | RowFlag.DRAFTED)
    table = packed[:, HEAD:]
    table[:] = 1 + np.arange(table.size).reshape(table.shape) % (catalogue.scheduler.num_pages - 1)
    return packed
