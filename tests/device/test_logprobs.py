"""Logprobs against float64; the block-wise prompt scores against the plain ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.logprobs import prompt_logprobs, score
from jaxserve.request import MAX_LOGPROBS

VOCAB, WIDTH = 300, 8


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(16, VOCAB)).astype(np.float32) * 8


def test_scores_are_those_of_float64(logits):
    token = np.random.default_rng(1).integers(0, VOCAB, 16).astype(np.int32)
    scores = jax.jit(score)(jnp.asarray(logits), jnp.asarray(token))
    exact = log_softmax(logits)
    own = exact[np.arange(16), token]
    np.testing.assert_allclose(scores.logprob, own, atol=2e-5)
    np.testing.assert_array_equal(scores.rank, 1 + (exact > own[:, None]).sum(-1))
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(scores.top_ids, order)
    np.testing.assert_allclose(scores.top_logprobs, np.take_along_axis(exact, order, -1), atol=2e-5)


@pytest.mark.parametrize("place", [0, 1, 7, 19])
def test_a_token_among_the_top_has_its_own_logprob_bit_for_bit(logits, place):
    token = np.argsort(-logits, axis=-1, kind="stable")[:, place].astype(np.int32)
    scores = jax.jit(score)(jnp.asarray(logits), jnp.asarray(token))
    np.testing.assert_array_equal(np.asarray(scores.top_logprobs)[:, place], np.asarray(scores.logprob))
    np.testing.assert_array_equal(scores.rank, place + 1)


def test_equal_logits_share_a_rank_and_keep_their_own_entries():
    logits = jnp.asarray([[0.0, 2.0, 1.0, 2.0, 1.0] + [-1.0] * 20], jnp.float32)
    scores = score(logits, jnp.array([4]))
    assert int(scores.rank[0]) == 3
    assert np.asarray(scores.top_ids[0, :5]).tolist() == [1, 3, 2, 4, 0]


def test_a_vocabulary_smaller_than_the_list_is_padded():
    scores = score(jnp.asarray([[0.0, 1.0, 2.0]], jnp.float32), jnp.array([1]))
    assert np.asarray(scores.top_ids[0]).tolist() == [2, 1, 0] + [-1] * (MAX_LOGPROBS - 3)
    assert np.isneginf(np.asarray(scores.top_logprobs[0, 3:])).all()


@pytest.mark.parametrize("count", [1, 16, 48, 64, 80, 128])
def test_prompt_logprobs_lose_no_position(count):
    rng = np.random.default_rng(count)
    head = jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(count, WIDTH)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, count), jnp.int32)

    def logits_of(block):
        assert block.shape == (64, WIDTH), "the head must see blocks, never the whole chunk"
        return jnp.dot(block, head, precision="highest")

    logprob, rank, top_ids, top_logprobs = jax.jit(lambda h, t: prompt_logprobs(logits_of, h, t))(hidden, targets)
    assert logprob.shape == rank.shape == (count,)
    assert top_ids.shape == top_logprobs.shape == (count, MAX_LOGPROBS)
    exact = log_softmax(np.asarray(hidden, np.float64) @ np.asarray(head, np.float64))
    own = exact[np.arange(count), np.asarray(targets)]
    np.testing.assert_allclose(logprob, own, atol=5e-5)
    np.testing.assert_allclose(top_logprobs, -np.sort(-exact, axis=-1)[:, :MAX_LOGPROBS], atol=5e-5)
    assert (np.abs(np.asarray(rank) - 1 - (exact > own[:, None]).sum(-1)) <= 1).all()  # equal to the last bit is rare
