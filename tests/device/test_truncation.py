"""Truncation by drawing again above a token, against a mask made with a full sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.truncation import _kth_smallest, argmax, truncated_draw
from tests.device.oracle import Params, make_rows, probabilities

ROWS, VOCAB = 8, 3000

compiled_draw = jax.jit(truncated_draw)


@pytest.mark.parametrize("step", [0, 1 / 8], ids=["all different", "many equal"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e6])
def test_the_cut_holds_the_k_smallest_and_what_equals_the_last(step, scale):
    values = np.abs(np.random.default_rng(0).normal(size=(ROWS, VOCAB))) * 3
    values = (np.round(values / step) * step if step else values).astype(np.float32) * np.float32(scale)
    values[1, 5:] = np.inf
    values[2] = 0
    for k in (1, 2, 50, 1000, VOCAB - 1, VOCAB, 10**9):
        cut = np.asarray(jax.jit(_kth_smallest)(jnp.asarray(values), jnp.full(ROWS, k, jnp.int32)))
        last = np.sort(values, axis=-1)[:, min(k, VOCAB) - 1]
        np.testing.assert_array_equal(values <= cut[:, None], (values <= last[:, None]) | (k >= VOCAB))


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 8.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.9), (0, 0.2), (50, 1.0), (1, 1.0), (50, 0.9), (1000, 0.5), (64, 0.95)]
)
def test_the_token_is_the_best_of_those_a_sort_would_keep(scale, top_k, top_p):
    rng = np.random.default_rng(top_k)
    logits = (rng.normal(size=(ROWS, VOCAB)) * scale).astype(np.float32)
    scores = (logits + rng.gumbel(size=logits.shape)).astype(np.float32)
    rows, _, _ = make_rows([Params(temperature=1.0, top_k=top_k, top_p=top_p)] * ROWS, VOCAB)
    token = compiled_draw(
        jnp.asarray(logits), jnp.asarray(scores), jnp.asarray(scores.argmax(-1), jnp.int32), rows.rules
    )
    for row in range(ROWS):
        kept = probabilities(logits[row], Params(temperature=1.0, top_k=top_k, top_p=top_p)) > 0
        assert token[row] == np.where(kept, scores[row], -np.inf).argmax()


def test_a_row_of_nan_ends_the_search():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[0], logits[1, ::2], logits[2, 7], logits[3] = np.nan, np.nan, np.inf, -np.inf
    rows, _, _ = make_rows([Params(temperature=1.0, top_k=3, top_p=0.1)] * ROWS, VOCAB)
    token = compiled_draw(jnp.asarray(logits), jnp.asarray(logits), jnp.full(ROWS, VOCAB - 1, jnp.int32), rows.rules)
    assert ((np.asarray(token) >= 0) & (np.asarray(token) < VOCAB)).all()


def test_argmax_takes_the_lowest_of_equals():
    scores = jnp.asarray([[1.0, 3.0, 3.0, 2.0], [-jnp.inf] * 4])
    token, best = argmax(scores)
    assert np.asarray(token).tolist() == [1, 0]
    assert np.asarray(best).tolist() == [3.0, -np.inf]
