"""The sampler: one token per row from its logits, by that row's own parameters.

Pure, and per row: what a mate asks for changes no token.  Never decides what ends a sequence, and keeps no state: a
draw depends on the logits, the row's parameters and (seed, position)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxserve.device.logprobs import Scores, prompt_logprobs, score
from jaxserve.device.noise import gumbel
from jaxserve.device.state import SEEN_IN_PROMPT, RowFlag, RowState, Rules
from jaxserve.device.truncation import argmax, keep_min_p, truncated_draw
from jaxserve.request import MAX_LOGPROBS

__all__ = ["PROCESSORS", "Drawn", "draw", "float_bits", "pack_drawn", "prompt_logprobs", "record"]

DRAWN_WIDTH = 4 + 2 * MAX_LOGPROBS  # token (-1 = none), is_nan, rank, logprob bits, top ids, top logprob bits

_NEVER = -jnp.inf
_GROUP_LOGITS = 8 * 49152  # logits worked on together on CPU: 1.5 MiB each time they are held


@struct.dataclass
class Drawn:
    """What each row drew.  A row with `is_nan` has no token to speak of: its logits held NaN or +inf, or its rules
    left nothing to draw.  The last four are zeros unless some row of the call has RowFlag.LOGPROBS."""

    token: Array  # [R] int32, always a valid id
    logprob: Array  # [R] float32
    rank: Array  # [R] int32
    top_ids: Array  # [R, MAX_LOGPROBS] int32
    top_logprobs: Array  # [R, MAX_LOGPROBS] float32
    is_nan: Array  # [R] bool


@struct.dataclass
class RowInputs:
    """What a rule may read of a row besides its logits."""

    state: RowState
    mask: Array  # [R, ceil(V/32)] uint32  bit i of word w allows id 32*w + i
    flags: Array  # [R] int32  RowFlag

    @property
    def rules(self) -> Rules:
        return self.state.rules


def record(rows: RowState, token: Array, takes: Array) -> RowState:
    """The rows after each took its token, where `takes` [R]: what the draw of the next position must see."""
    taken = takes.astype(jnp.int32)
    row = lax.iota(jnp.int32, token.shape[0])
    return replace(rows, length=rows.length + taken, counts=rows.counts.at[row, token].add(taken))


def draw(logits: Array, rows: RowState, mask: Array, flags: Array) -> Drawn:
    """The next token of each row: the one at index rows.length of its sequence.

    logits [R, V] float32, rows of `slots.rows_of`, mask [R, ceil(V/32)] uint32, flags [R] int32 RowFlag."""
    inputs = RowInputs(state=rows, mask=mask, flags=flags)
    return lax.platform_dependent(logits, inputs, cpu=_draw_in_groups, default=_draw_rows)


def pack_drawn(drawn: Drawn, takes: Array) -> Array:
    """-> [R, DRAWN_WIDTH] int32 for the host; the token is -1 where the row takes none."""
    head = [jnp.where(takes, drawn.token, -1), drawn.is_nan.astype(jnp.int32), drawn.rank, float_bits(drawn.logprob)]
    return jnp.concatenate([jnp.stack(head, axis=1), drawn.top_ids, float_bits(drawn.top_logprobs)], axis=1)


def float_bits(values: Array) -> Array:
    """float32 as the int32 of the same bits."""
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)


def _draw_in_groups(logits: Array, inputs: RowInputs) -> Drawn:
    """A few rows after the other, so that the dozen passes over their logits stay in a core's cache: at 32 rows of
    49,152 all at once take three times as long, most of it in page faults of the buffers between."""
    rows, vocab = logits.shape
    size = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * vocab <= _GROUP_LOGITS))
    if size == rows:
        return _draw_rows(logits, inputs)
    groups = jax.tree.map(lambda field: field.reshape(rows // size, size, *field.shape[1:]), (logits, inputs))
    drawn = lax.map(lambda group: _draw_rows(*group), groups)
    return jax.tree.map(lambda field: field.reshape(rows, *field.shape[2:]), drawn)


def _draw_rows(logits: Array, inputs: RowInputs) -> Drawn:
    processed = logits
    for flag, process in PROCESSORS:
        with jax.named_scope(process.__name__.strip("_")):
            processed = lax.cond(_any(inputs, flag), process, lambda unchanged, _: unchanged, processed, inputs)
    with jax.named_scope("draw"):
        token, best = _draw_token(processed, inputs)
    is_nan = jnp.any(~(logits < jnp.inf), axis=-1) | ~jnp.isfinite(best)
    token = jnp.where(is_nan, 0, token)
    with jax.named_scope("logprobs"):
        wants_logprobs = _any(inputs, RowFlag.LOGPROBS)
        scored = lax.cond(wants_logprobs, score, lambda *_: Scores.zeros(token.shape[0]), logits, token)
    return Drawn(
        token=token,
        logprob=scored.logprob,
        rank=scored.rank,
        top_ids=scored.top_ids,
        top_logprobs=scored.top_logprobs,
        is_nan=is_nan,
    )


def _any(inputs: RowInputs, flag: RowFlag) -> Array:
    return jnp.any((inputs.flags & flag) != 0)


def _draw_token(logits: Array, inputs: RowInputs) -> tuple[Array, Array]:
    """logits [R, V] after every rule but top-k and top-p -> token [R], and the highest score [R].

    Gumbel-max: the argmax of log-probability plus Gumbel noise is a draw from the distribution."""
    scores = lax.cond(_any(inputs, RowFlag.SAMPLED), _add_noise, lambda logits, _: logits, logits, inputs)
    token, best = argmax(scores)
    token = lax.cond(
        _any(inputs, RowFlag.TRUNCATED),
        lambda logits, scores, token: truncated_draw(logits, scores, token, inputs.rules),
        lambda logits, scores, token: token,
        logits, scores, token,
    )  # fmt: skip
    return token, best


def _add_noise(logits: Array, inputs: RowInputs) -> Array:
    noise = gumbel(inputs.rules.seed, inputs.state.length, logits.shape[-1])
    return jnp.where((inputs.rules.temperature == 0)[:, None], logits, logits + noise)


# The rules: logits [R, V], inputs -> logits [R, V].  A row that does not ask for a rule holds values that leave its
# logits as they are, to the bit, because a mate may ask.


def _penalise(logits: Array, inputs: RowInputs) -> Array:
    """Repetition: what the prompt or the output holds is divided (or, below zero, multiplied).  Presence and
    frequency: what was generated loses a constant, and as much again each time."""
    counts, rules = inputs.state.counts, inputs.rules
    repetition = rules.repetition[:, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, penalised, logits)
    generated = (counts & (SEEN_IN_PROMPT - 1)).astype(jnp.float32)
    logits = logits - rules.frequency[:, None] * generated
    return logits - rules.presence[:, None] * (generated > 0).astype(jnp.float32)


def _add_biases(logits: Array, inputs: RowInputs) -> Array:
    return _at(logits, inputs.rules.bias_ids).add(inputs.rules.bias_values, mode="drop")


def _keep_allowed(logits: Array, inputs: RowInputs) -> Array:
    ids = inputs.rules.allowed_ids
    is_limited = jnp.any(ids >= 0, axis=-1, keepdims=True)
    is_allowed = _at(jnp.zeros(logits.shape, jnp.bool_), ids).set(True, mode="drop")
    return jnp.where(is_allowed | ~is_limited, logits, _NEVER)


def _hold_back_stop_ids(logits: Array, inputs: RowInputs) -> Array:
    is_short = (inputs.state.length < inputs.rules.min_len)[:, None]
    return _at(logits, jnp.where(is_short, inputs.rules.stop_ids, -1)).set(_NEVER, mode="drop")


def _apply_mask(logits: Array, inputs: RowInputs) -> Array:
    rows, vocab = logits.shape
    bits = (inputs.mask[:, :, None] >> lax.iota(jnp.uint32, 32)[None, None, :]) & jnp.uint32(1)
    is_allowed = bits.reshape(rows, -1)[:, :vocab] > 0
    is_masked = ((inputs.flags & RowFlag.MASK) != 0)[:, None]
    return jnp.where(is_allowed | ~is_masked, logits, _NEVER)


def _apply_temperature(logits: Array, inputs: RowInputs) -> Array:
    temperature = inputs.rules.temperature[:, None]
    is_greedy = temperature == 0
    # The best first becomes 0: dividing by a tiny temperature may then overflow to -inf, never to +inf.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(is_greedy, logits, below / jnp.where(is_greedy, 1.0, temperature))


def _keep_min_p(logits: Array, inputs: RowInputs) -> Array:
    return keep_min_p(logits, inputs.rules)


def _at(values: Array, ids: Array):
    """values [R, V] indexed by each row's ids [R, n], for `mode="drop"`; -1 = none (to JAX the last one)."""
    row = lax.broadcasted_iota(jnp.int32, ids.shape, 0)
    return values.at[row, jnp.where(ids < 0, values.shape[-1], ids)]


Process = Callable[[Array, RowInputs], Array]

# In this order.  Each runs only when some row of the call has its flag.
PROCESSORS: tuple[tuple[RowFlag, Process], ...] = (
    (RowFlag.PENALTIES, _penalise),
    (RowFlag.BIAS, _add_biases),
    (RowFlag.ALLOWED, _keep_allowed),
    (RowFlag.MIN_TOKENS, _hold_back_stop_ids),
    (RowFlag.MASK, _apply_mask),
    (RowFlag.SAMPLED, _apply_temperature),
    (RowFlag.TRUNCATED, _keep_min_p),
)
