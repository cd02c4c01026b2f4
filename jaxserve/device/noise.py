"""The noise of a draw: a function of (seed, position, token id) and of nothing else.

A counter hash, not `jax.random`: no array of keys, and no value depends on the row, the number of rows or the shape
of the program.  Never holds state: position p of a sequence has the same noise whenever, and however often, it is
computed."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio, odd: consecutive ids land far apart
_DOMAINS = (0x85EBCA6B, 0xC2B2AE35)  # the two halves of a key start from different points


def gumbel(seed: Array, position: Array, vocab: int) -> Array:
    """seed [R, 2] uint32, position [R] int32 -> [R, vocab] float32 of the standard Gumbel distribution.

    -log(-log1p(-u)): u keeps its full precision near 0, where the largest values come from (up to 22.2; the usual
    -log(-log(u)) in float32 ends at 16.6)."""
    return -jnp.log(-jnp.log1p(-uniform(seed, position, vocab)))


def uniform(seed: Array, position: Array, vocab: int) -> Array:
    """seed [R, 2] uint32, position [R] int32 -> [R, vocab] float32 in (0, 1): multiples of 2**-32."""
    bits = _hash(seed, position, vocab) >> jnp.uint32(1)  # 31 bits: int32 to float is one instruction on every CPU
    fraction = (bits.astype(jnp.int32).astype(jnp.float32) + 0.5) * jnp.float32(2**-31)
    return jnp.minimum(fraction, jnp.float32(1 - 2**-24))  # the last few round to 1, whose logarithm is infinite


def _hash(seed: Array, position: Array, vocab: int) -> Array:
    """[R, vocab] uint32.  Two rounds with half a key each: one round would give two keys that differ by d * _GOLDEN
    the same noise, shifted by d ids."""
    first, second = (_key(seed, position, domain)[:, None] for domain in _DOMAINS)
    counter = lax.iota(jnp.uint32, vocab)[None, :] * jnp.uint32(_GOLDEN)
    return _mix(_mix(counter + first) ^ second)


def _key(seed: Array, position: Array, domain: int) -> Array:
    """[R] uint32: for one seed, no two positions share a key."""
    key = _mix(seed[:, 0] ^ jnp.uint32(domain))
    key = _mix(key + seed[:, 1] + jnp.uint32(_GOLDEN))
    return _mix(key + lax.bitcast_convert_type(position, jnp.uint32) + jnp.uint32(domain))


def _mix(x: Array) -> Array:
    """A bijection of uint32 in which every input bit moves every output bit with a chance of one half: `lowbias32` of
    C. Wellons' hash prospector."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
