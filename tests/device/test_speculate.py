"""Prompt lookup against a plain search, and the accept path against exact probabilities."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from checkpoints.hub import resolve
from jaxserve.catalogue import Catalogue
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.device.draft_model import SecondModel
from jaxserve.device.sampling import DRAWN_WIDTH
from jaxserve.device.sharding import make_mesh
from jaxserve.device.slots import empty_slots
from jaxserve.device.speculate import NGram, Proposed, accept, verify
from jaxserve.device.state import KVPool, RowFlag, SlotShape
from jaxserve.device.steps import HEAD
from jaxserve.drafts import make_draft
from jaxserve.models.decoder import Layout
from jaxserve.models.loading import load_params
from jaxserve.request import SamplingParams
from jaxserve.runner import Runner
from jaxserve.sched.plan import Call, Plan, Row, SlotLoad
from tests.device.oracle import with_rules
from tests.tiny_model import write_tiny_model

MAX_LEN = 64


def looked_up(tokens: list[int], drafts: int, *, longest: int = 6, shortest: int = 2) -> list[int]:
    """The same search, written to be read."""
    for size in range(longest, shortest - 1, -1):
        newest = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == newest:
                tail = tokens[end:]
                return [tail[i % len(tail)] for i in range(drafts)]
    return []


def test_prompt_lookup_finds_the_latest_of_the_longest_matches() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, alphabet, length).tolist() for alphabet in (2, 3, 5, 50) for length in range(1, 61, 4)]
    texts += [[7] * 20, [1, 2] * 10, [1, 2, 3, 9, 1, 2, 3]]
    slots = empty_slots(SlotShape(slots=len(texts), max_len=MAX_LEN, vocab=64, stop_ids=1, biases=1, allowed_ids=1))
    length = jnp.array([*map(len, texts), 0], jnp.int32)
    rows = [text + rng.integers(0, 5, MAX_LEN - len(text)).tolist() for text in texts]  # what lies behind is noise
    slots = slots.replace(tokens=jnp.array([*rows, [0] * MAX_LEN], jnp.int32), length=length, kv_len=length - 1)
    slots = with_rules(slots, limit=length + 9)
    packed = np.zeros((len(texts), HEAD + 1), np.int32)
    packed[:, 0], packed[:, 1] = range(len(texts)), 6
    pool, mesh = KVPool(data=jnp.zeros((1,))), make_mesh(jax.devices(), 1)
    proposed, _ = NGram().propose({}, pool, slots, packed, drafts=5, backend="xla", mesh=mesh)
    for text, tokens, count in zip(texts, proposed.tokens.tolist(), proposed.count.tolist(), strict=True):
        assert tokens[:count] == looked_up(text, 5), text


@pytest.mark.parametrize("kind", ["far from the target", "deterministic"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 20))])
def test_accepted_text_has_the_targets_distribution(seed: int, kind: str) -> None:
    """100,000 unseeded answers of up to four tokens over ten ids, temperature, top-k and top-p on: every token is
    distributed as the target says, given that the drafts before it were accepted."""
    rng = np.random.default_rng(seed)
    vocab, drafts, rows, rounds = 10, 3, 2000, 50
    temperature, top_k, top_p = 0.8, 7, 0.9
    logits = rng.normal(0, 1.5, (drafts + 1, vocab)).astype(np.float32)
    slots = empty_slots(SlotShape(slots=rows, max_len=8, vocab=vocab, stop_ids=1, biases=1, allowed_ids=1))
    full = lambda value: jnp.full((rows + 1,), value, jnp.int32)  # noqa: E731
    slots = slots.replace(length=full(2), kv_len=full(1))
    slots = with_rules(slots, limit=8, temperature=temperature, top_k=top_k, top_p=top_p)
    packed = np.zeros((rows, HEAD + 1), np.int32)
    packed[:, 0], packed[:, 1] = range(rows), drafts + 1
    packed[:, 3] = RowFlag.TAKES_TOKEN | RowFlag.SAMPLED | RowFlag.TRUNCATED
    mask = np.zeros((rows, drafts + 1, 1), np.uint32)
    step = jax.jit(accept)
    counts = np.zeros((drafts + 1, vocab))
    for _ in range(rounds):
        slots = with_rules(slots, seed=rng.integers(0, 2**32, (rows + 1, 2), dtype=np.uint32))
        if kind == "deterministic":
            tokens = np.tile(logits.argmax(1)[:drafts], (rows, 1))
        else:
            tokens = rng.choice(vocab, (rows, drafts), p=np.arange(1, vocab + 1) / np.arange(1, vocab + 1).sum())
        proposed = Proposed(tokens=jnp.asarray(tokens, jnp.int32), count=jnp.full((rows,), drafts, jnp.int32))
        many = jnp.broadcast_to(logits[None], (rows, *logits.shape))
        drawn, _ = step(slots, many, jnp.full((rows,), 1 + drafts + 1, jnp.int32), packed, mask, proposed)
        drawn = np.asarray(drawn)[:, 1:].reshape(rows, drafts + 1, DRAWN_WIDTH)[:, :, 0]
        for position in range(drafts + 1):
            taken = drawn[:, position][drawn[:, position] >= 0]
            counts[position] += np.bincount(taken, minlength=vocab)
    assert counts[0].sum() == rows * rounds
    for position in range(drafts + 1):
        wanted = exact_probabilities(logits[position], temperature, top_k, top_p)
        assert not counts[position][wanted == 0].any()
        if (
            counts[position].sum() < 1000 or np.count_nonzero(wanted) == 1
        ):  # hardly any draft came that far, or no choice
            continue
        expected = wanted[wanted > 0] * counts[position].sum()
        assert chisquare(counts[position][wanted > 0], expected).pvalue > 1e-3, position


def exact_probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    scores = logits.astype(np.float64) / temperature
    order = np.argsort(-scores)
    scores[order[top_k:]] = -np.inf
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= top_p]] = 0
    return weights / weights.sum()


def no_second_model(reference: str) -> SecondModel:
    raise AssertionError(f"{reference} is asked for")


@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_drafts_from_the_targets_own_weights_change_no_token_in_either_layout(tmp_path: Path, layout: Layout) -> None:
    """The scan over stacked weights is what a TPU runs."""
    files, mesh = resolve(str(write_tiny_model(tmp_path / "tiny"))), make_mesh(jax.devices(), 1)
    model, params = load_params(files, dtype="float32", mesh=mesh, layout=layout)
    prompt, pages = tuple(np.random.default_rng(1).integers(3, 400, 20).tolist()), (1, 2, 3, 4)
    texts = []
    for name, drafts in (("none", 0), ("self:layers=1", 3), ("self:int4", 3)):
        scheduler = SchedulerConfig(
            slots=1, page_size=16, num_pages=5, max_len=64, queue_limit=1, decode_buckets=(1,),
            prefill_buckets=((1, 32),), num_drafts=drafts,
        )  # fmt: skip
        config, draft = EngineConfig(slots=1), make_draft(name, model, no_second_model)
        runner = Runner(params, Catalogue.of(model, scheduler, config, mesh=mesh, backend="xla", draft=draft))
        runner.warm_up()
        load = SlotLoad(0, prompt, len(prompt), 60, 0, (), 0, SamplingParams(temperature=0))
        plan = Plan(0, (load,), Call((Row(0, 0, 0, 0, len(prompt), pages),), 1, 32))
        text = list(runner.dispatch(plan).result().rows[0].token_ids)
        plan = Plan(1, (), None, Call((Row(0, 0, 0, -1, 1 + drafts, pages),), 1, 1 + drafts))
        while len(prompt) + len(text) < 60:
            text += runner.dispatch(plan).result().rows[0].token_ids
        texts.append(text)
    assert all(text == texts[0] for text in texts[1:]) and len(texts[0]) == 40


def test_the_device_stops_at_a_rows_limit_whatever_it_is_asked_for() -> None:
    """The host may be a step behind: drafts past the limit would be written to pages that nobody reserved."""
    slots = empty_slots(SlotShape(slots=3, max_len=MAX_LEN, vocab=64, stop_ids=1, biases=1, allowed_ids=1))
    length, limit = jnp.array([10, 10, 10, 0], jnp.int32), jnp.array([12, 10, 40, 0], jnp.int32)
    slots = slots.replace(tokens=jnp.full((4, MAX_LEN), 7, jnp.int32), length=length, kv_len=length - 1)
    slots = with_rules(slots, limit=limit)
    packed = np.zeros((3, HEAD + 1), np.int32)
    packed[:, 0], packed[:, 1], packed[:, 3] = range(3), 4, RowFlag.TAKES_TOKEN
    seen = []

    class Target:
        """Draws token 7 always, so that every draft is right."""

        shape, dtype = None, "float32"

        def forward(self, params, tokens, positions, pool, attend):
            seen.append(positions)
            return jnp.zeros((*tokens.shape, 1)), pool

        def logits(self, params, hidden):
            return jnp.zeros((*hidden.shape[:-1], 64)).at[..., 7].set(1.0)

    proposed = Proposed(tokens=jnp.full((3, 3), 7, jnp.int32), count=jnp.full((3,), 3, jnp.int32))
    pool, mesh = KVPool(data=jnp.zeros((1,))), make_mesh(jax.devices(), 1)
    forwarded, _ = verify(Target(), {}, pool, slots, packed, proposed, drafts=3, backend="xla", mesh=mesh)
    assert forwarded.kv_len.tolist() == [11, 0, 13]
    assert int(seen[0].max(1)[0]) == 10, "a position past the limit"
    drawn, slots = accept(slots, forwarded.logits, forwarded.kv_len, packed, np.zeros((3, 4, 2), np.uint32), proposed)
    assert slots.length.tolist()[:3] == [12, 10, 14]
    assert slots.kv_len.tolist()[:3] == [11, 9, 13]
    assert drawn[:, 0].tolist() == [1, 0, 3]


def test_a_row_takes_nothing_at_a_position_that_its_mask_closes() -> None:
    """All drafts are right; the second row's mask closes position 2, the third row has no mask to read."""
    slots = empty_slots(SlotShape(slots=3, max_len=64, vocab=64, stop_ids=1, biases=1, allowed_ids=1))
    length = jnp.full((4,), 10, jnp.int32)
    slots = with_rules(slots.replace(length=length, kv_len=length - 1), limit=length + 20)
    packed = np.zeros((3, HEAD + 1), np.int32)
    packed[:, 0], packed[:, 1] = range(3), 4
    packed[:, 3] = RowFlag.TAKES_TOKEN | RowFlag.MASK, RowFlag.TAKES_TOKEN | RowFlag.MASK, RowFlag.TAKES_TOKEN
    mask = np.full((3, 4, 2), 0xFFFFFFFF, np.uint32)
    mask[0, 1, 0] &= ~np.uint32(1 << 7)  # the target's token may not stand there
    mask[1, 2:] = mask[2] = 0
    logits = jnp.zeros((3, 4, 64)).at[..., 7].set(1.0)
    proposed = Proposed(tokens=jnp.full((3, 3), 7, jnp.int32), count=jnp.full((3,), 3, jnp.int32))
    drawn, slots = accept(slots, logits, jnp.full((3,), 13, jnp.int32), packed, mask, proposed)
    tokens = np.asarray(drawn)[:, 1:].reshape(3, 4, DRAWN_WIDTH)[:, :, 0].tolist()
    assert tokens == [[7, 0, -1, -1], [7, 7, -1, -1], [7, 7, 7, 7]]
    assert slots.length.tolist()[:3] == [12, 12, 14]
