"""The slots: how a sequence's rules lie in one row of int32, and how a slot is given to a sequence.

A load is one packed int32 vector, and resets every field of the slot.  It runs at every admission (first, resumed,
prefix hit), so nothing of the last owner is left behind.  What the fields mean to a draw is not decided here, and a
step's own changes (tokens, lengths, counts) are made by the steps."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.device.state import SEEN_IN_PROMPT, RowState, Rules, SlotShape, SlotState

# The head of a load, by position, and of the rules behind it; floats travel as their bits.
LOAD_HEAD = ("slot", "length", "prompt_len")
INTS = ("limit", "min_len", "seed_low", "seed_high", "top_k")
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


def rules_width(shape: SlotShape) -> int:
    """W: int32 words of the rules: INTS, FLOATS, stop ids [E], bias ids [B], bias values [B], allowed ids [A]."""
    return len(INTS) + len(FLOATS) + shape.stop_ids + 2 * shape.biases + shape.allowed_ids


def load_width(shape: SlotShape) -> int:
    """int32 words of a load: LOAD_HEAD, rules [W], tokens [max_len]."""
    return len(LOAD_HEAD) + rules_width(shape) + shape.max_len


def empty_slots(shape: SlotShape) -> SlotState:
    """Nothing known, and rules that change no logits."""
    rows = shape.slots + 1
    zero, off, one = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), jnp.float32), jnp.ones((rows,), jnp.float32)
    rules = Rules(
        limit=zero, min_len=zero, seed=jnp.zeros((rows, 2), jnp.uint32), top_k=zero, temperature=off, top_p=one,
        min_p=off, presence=off, frequency=off, repetition=one, stop_ids=jnp.full((rows, shape.stop_ids), -1),
        bias_ids=jnp.full((rows, shape.biases), -1), bias_values=jnp.zeros((rows, shape.biases), jnp.float32),
        allowed_ids=jnp.full((rows, shape.allowed_ids), -1),
    )  # fmt: skip
    return SlotState(
        tokens=jnp.zeros((rows, shape.max_len), jnp.int32), length=jnp.zeros((rows,), jnp.int32),
        kv_len=jnp.zeros((rows,), jnp.int32), counts=jnp.zeros((rows, shape.vocab), jnp.int32), rules=pack_rules(rules),
        shape=shape,
    )  # fmt: skip


def load_slot(slots: SlotState, packed: Array) -> SlotState:
    """packed: [load_width] int32 -> slots with one row reset and its counts rebuilt from its tokens."""
    head, rules, tokens = jnp.split(packed, [len(LOAD_HEAD), len(LOAD_HEAD) + rules_width(slots.shape)])
    slot, length, prompt_len = head
    return replace(
        slots,
        tokens=slots.tokens.at[slot].set(tokens),
        length=slots.length.at[slot].set(length),
        kv_len=slots.kv_len.at[slot].set(0),
        counts=slots.counts.at[slot].set(_counts(tokens, prompt_len, length, slots.shape.vocab)),
        rules=slots.rules.at[slot].set(rules),
    )


def rows_of(slots: SlotState, slot: Array) -> RowState:
    """The rows' slots, slot [R], as a draw reads them."""
    length, counts, rules = (field.at[slot].get(mode="clip") for field in (slots.length, slots.counts, slots.rules))
    return RowState(length=length, counts=counts, rules=unpack_rules(rules, slots.shape))


def limits_of(slots: SlotState, slot: Array) -> Array:
    """[R]: how many tokens the rows' slots, slot [R], may hold."""
    return slots.rules[slot, INTS.index("limit")]


def fill_slots(slots: SlotState, *, length: int | Array, limit: int) -> SlotState:
    """Every slot as if it held so many tokens and might hold up to `limit`: for measurements."""
    known = jnp.full(slots.length.shape, length, jnp.int32)
    rules = slots.rules.at[:, INTS.index("limit")].set(limit)
    return replace(slots, length=known, kv_len=known - 1, rules=rules)


def pack_rules(rules: Rules) -> Array:
    """[...] -> [..., W] int32"""
    seed = lax.bitcast_convert_type(rules.seed, jnp.int32)
    ints = {"limit": rules.limit, "min_len": rules.min_len, "top_k": rules.top_k}
    ints |= {"seed_low": seed[..., 0], "seed_high": seed[..., 1]}
    parts = [
        jnp.stack([ints[name] for name in INTS], axis=-1),
        _as_int(jnp.stack([getattr(rules, name) for name in FLOATS], axis=-1)),
        rules.stop_ids, rules.bias_ids, _as_int(rules.bias_values), rules.allowed_ids,
    ]  # fmt: skip
    return jnp.concatenate(parts, axis=-1)


def unpack_rules(packed: Array, shape: SlotShape) -> Rules:
    """[..., W] int32 -> [...]"""
    widths = (len(INTS), len(FLOATS), shape.stop_ids, shape.biases, shape.biases)
    parts = jnp.split(packed, [sum(widths[: i + 1]) for i in range(len(widths))], axis=-1)
    ints = {name: parts[0][..., i] for i, name in enumerate(INTS)}
    seed = jnp.stack([ints.pop("seed_low"), ints.pop("seed_high")], axis=-1)
    floats = {name: _as_float(parts[1])[..., i] for i, name in enumerate(FLOATS)}
    return Rules(
        **ints, **floats, seed=lax.bitcast_convert_type(seed, jnp.uint32), stop_ids=parts[2], bias_ids=parts[3],
        bias_values=_as_float(parts[4]), allowed_ids=parts[5],
    )  # fmt: skip


def _as_int(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32)


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
