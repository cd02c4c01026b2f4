"""The noise is standard Gumbel, independent over seeds, positions and ids, and the same in every shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device import noise as noise_module
from jaxserve.device.noise import gumbel, uniform

compiled_gumbel = jax.jit(gumbel, static_argnums=2)
compiled_uniform = jax.jit(uniform, static_argnums=2)


def key(seeds, positions) -> tuple[jax.Array, jax.Array]:
    seeds = np.asarray(seeds, np.uint64)
    halves = np.stack([seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)], 1).astype(np.uint32)
    return jnp.asarray(halves), jnp.asarray(np.asarray(positions, np.int32))


# Neighbours along one axis at a time, and far apart.
FAMILIES = {
    "seeds": (np.arange(256), np.full(256, 9)),
    "high halves of seeds": (np.arange(256, dtype=np.uint64) << np.uint64(32), np.full(256, 9)),
    "positions": (np.full(256, 1234), np.arange(256)),
    "far positions": (np.full(256, 1234), np.arange(256) * 4096 + 2**30),
    "seed and position together": (np.arange(256), 256 - np.arange(256)),
}


@pytest.fixture(params=FAMILIES, scope="module")
def sample(request) -> np.ndarray:
    """[256, 1024] of (0, 1)"""
    return np.asarray(compiled_uniform(*key(*FAMILIES[request.param]), 1024), np.float64)


def test_noise_is_uniform(sample):
    cells = np.bincount((sample.ravel() * 1024).astype(int), minlength=1024)
    expected = sample.size / 1024
    assert ((cells - expected) ** 2 / expected).sum() < 1023 + 4.5 * np.sqrt(2 * 1023)


def test_noise_is_uncorrelated_over_rows_and_ids(sample):
    centred = (sample - 0.5) * np.sqrt(12)
    for rows in (0, 1, 2, 16):
        for shift in (0, 1, 2, 32, 512):
            if rows or shift:
                a, b = centred[rows:, shift:], centred[: centred.shape[0] - rows, : centred.shape[1] - shift]
                assert abs((a * b).mean()) * np.sqrt(a.size) < 4.5, (rows, shift)


def test_keys_a_multiple_of_the_step_apart_do_not_share_noise():
    """One round of a hash over key + id * step would give two such keys one noise, shifted by a few ids."""
    seeds, positions = key(np.full(2**18, 5), np.arange(2**18))
    keys = np.asarray(noise_module._key(seeds, positions, noise_module._DOMAINS[0])).astype(np.uint64)
    steps = keys * pow(noise_module._GOLDEN, -1, 2**32) % 2**32  # of the key from 0, in ids
    order = np.argsort(steps)
    nearest = np.diff(steps[order]).argmin()
    first, second = order[nearest], order[nearest + 1]
    shift = int(steps[second] - steps[first])
    assert 0 < shift < 100
    rows = np.asarray(compiled_uniform(*key([5, 5], [first, second]), 5000))
    assert abs(np.corrcoef(rows[0, shift:], rows[1, :-shift])[0, 1]) < 0.07


def test_low_bits_of_neighbours_are_independent(sample):
    bits = (sample * 2**20).astype(np.int64)
    for shift in range(16):
        bit = (bits >> shift) & 1
        assert abs((bit[:, 1:] ^ bit[:, :-1]).mean() - 0.5) * 2 * np.sqrt(bit.size) < 4.5
        assert abs((bit[1:] ^ bit[:-1]).mean() - 0.5) * 2 * np.sqrt(bit.size) < 4.5


def test_gumbel_has_the_moments_and_the_tail_of_gumbel():
    noise = np.asarray(compiled_gumbel(*key(np.arange(400), np.arange(400)), 5000), np.float64)
    count = noise.size
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 4.5 * np.pi / np.sqrt(6 * count)
    assert abs(noise.var() / (np.pi**2 / 6) - 1) < 4.5 * np.sqrt(4.4 / count)
    for level in (4.0, 6.0, 8.0, 10.0):
        expected = count * -np.expm1(-np.exp(-level))
        assert abs((noise > level).sum() - expected) < 4.5 * np.sqrt(expected), level


def test_the_largest_values_come_from_the_finest_numbers():
    keys = key(np.arange(2000), np.zeros(2000))
    values = np.asarray(compiled_uniform(*keys, 5000), np.float64)
    noise = np.asarray(compiled_gumbel(*keys, 5000))
    assert values.min() > 0
    assert values.min() < 2**-22, "ten million values come nearer to 0 than 24 bits can say"
    np.testing.assert_allclose(noise, -np.log(-np.log1p(-values)), atol=2e-6, rtol=1e-6)


def test_a_value_that_rounds_to_one_is_kept_below_it():
    keys = key([0, 0], [8378, 39354])  # ids 490 and 95: their hash is within 64 of the top
    values = np.asarray(compiled_uniform(*keys, 512))
    assert values[0, 490] == values[1, 95] == 1 - 2**-24
    assert np.isfinite(np.asarray(compiled_gumbel(*keys, 512))).all()


@pytest.mark.parametrize("vocab", [97, 512, 49152])
def test_noise_depends_on_no_shape(vocab):
    seeds, positions = np.arange(8) * 77777777777, np.arange(8) * 1000 + 5
    whole = np.asarray(compiled_gumbel(*key(seeds, positions), vocab))
    for rows in (slice(0, 1), slice(3, 4), slice(2, 5)):
        np.testing.assert_array_equal(
            np.asarray(compiled_gumbel(*key(seeds[rows], positions[rows]), vocab)), whole[rows]
        )
    wider = np.asarray(compiled_gumbel(*key(seeds, positions), vocab + 13))
    np.testing.assert_array_equal(wider[:, :vocab], whole)


def test_noise_is_what_it_was():
    """A seed given to a user must go on meaning the same: change this only with a note in the change log."""
    bits = np.asarray(compiled_uniform(*key([0, 2**64 - 1], [0, 7]), 3), np.float64) * 2**32
    assert bits.tolist() == [[3105217536, 169729264, 1522289536], [2843878144, 1617123712, 1391043712]]
