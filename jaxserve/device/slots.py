"""Giving a slot to a sequence: one packed int32 vector in, every field of the slot reset.

Runs at every admission (first, resumed, prefix hit), so nothing of the last owner is left behind."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.device.state import SEEN_IN_PROMPT, SlotShape, SlotState

# The head of the vector, by position; floats travel as their bits.
INTS = ("slot", "length", "prompt_len", "limit", "min_len", "seed_low", "seed_high", "top_k")
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


def load_width(shape: SlotShape) -> int:
    """int32 words of one load: head, stop ids [E], bias ids [B], bias values [B], allowed ids [A], tokens [max_len]."""
    return len(INTS) + len(FLOATS) + shape.stop_ids + 2 * shape.biases + shape.allowed_ids + shape.max_len


def load_slot(slots: SlotState, packed: Array, *, shape: SlotShape) -> SlotState:
    """packed: [load_width] int32 -> slots with one row reset and its counts rebuilt from its tokens."""
    parts = jnp.split(
        packed,
        _offsets(len(INTS), len(FLOATS), shape.stop_ids, shape.biases, shape.biases, shape.allowed_ids),
    )
    ints = dict(zip(INTS, parts[0], strict=True))
    floats = dict(zip(FLOATS, _as_float(parts[1]), strict=True))
    tokens = parts[6]
    values = {
        "tokens": tokens,
        "kv_len": jnp.int32(0),
        "seed": lax.bitcast_convert_type(jnp.stack([ints.pop("seed_low"), ints.pop("seed_high")]), jnp.uint32),
        "stop_ids": parts[2],
        "bias_ids": parts[3],
        "bias_values": _as_float(parts[4]),
        "allowed_ids": parts[5],
        "counts": _counts(tokens, ints["prompt_len"], ints["length"], shape.vocab),
    }
    slot = ints.pop("slot")
    values |= ints | floats
    return replace(slots, **{name: getattr(slots, name).at[slot].set(value) for name, value in values.items()})


def _offsets(*widths: int) -> list[int]:
    return [sum(widths[: i + 1]) for i in range(len(widths))]


def _as_float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _counts(tokens: Array, prompt_len: Array, length: Array, vocab: int) -> Array:
    """[max_len] -> [V]: how often each id was generated, plus SEEN_IN_PROMPT where the prompt holds it."""
    at = lax.iota(jnp.int32, tokens.shape[0])
    is_output = ((at >= prompt_len) & (at < length)).astype(jnp.int32)
    in_prompt = jnp.where(at < prompt_len, SEEN_IN_PROMPT, 0)
    with jax.named_scope("counts"):
        generated = jnp.zeros((vocab,), jnp.int32).at[tokens].add(is_output)
        return generated + jnp.zeros((vocab,), jnp.int32).at[tokens].max(in_prompt)
