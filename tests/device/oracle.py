"""The sampler again, in numpy float64 and with a full sort: one row, one draw.  And rows to hand to the real one."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from jaxserve.device.slots import pack_rules, unpack_rules
from jaxserve.device.state import SEEN_IN_PROMPT, RowFlag, RowState, Rules, SlotState

EVERYTHING = sum(RowFlag)


@dataclass(kw_only=True)
class Params:
    """One row's parameters, neutral unless said otherwise."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_len: int = 0
    mask: np.ndarray | None = None  # [V] bool
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    seed: int = 0
    length: int | None = None  # when the tokens themselves do not matter
    logprobs: bool = False

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output) if self.length is None else self.length

    @property
    def flags(self) -> int:
        """Only what this row needs."""
        wanted = {
            RowFlag.PENALTIES: self.presence or self.frequency or self.repetition != 1,
            RowFlag.BIAS: self.bias,
            RowFlag.ALLOWED: self.allowed,
            RowFlag.MIN_TOKENS: self.position < self.min_len,
            RowFlag.MASK: self.mask is not None,
            RowFlag.SAMPLED: self.temperature > 0,
            RowFlag.TRUNCATED: self.temperature > 0 and (self.top_k or self.top_p < 1 or self.min_p),
            RowFlag.LOGPROBS: self.logprobs,
        }
        return RowFlag.TAKES_TOKEN | sum(flag for flag, is_wanted in wanted.items() if is_wanted)


def make_rows(params: list[Params], vocab: int) -> tuple[RowState, jnp.ndarray, jnp.ndarray]:
    """-> rows, mask, flags, as `draw` takes them."""
    rows = len(params)

    def padded(values, width: int, dtype, fill):
        out = np.full((rows, width), fill, dtype)
        for row, entries in enumerate(values):
            out[row, : len(entries)] = list(entries)
        return jnp.asarray(out)

    def column(name: str, dtype):
        return jnp.asarray(np.array([getattr(one, name) for one in params], dtype))

    seeds = np.array([[one.seed & 0xFFFFFFFF, one.seed >> 32] for one in params], np.uint32)
    rules = Rules(
        limit=jnp.full((rows,), np.iinfo(np.int32).max),
        min_len=column("min_len", np.int32),
        stop_ids=padded([one.stop_ids for one in params], 4, np.int32, -1),
        seed=jnp.asarray(seeds),
        **{name: column(name, np.float32) for name in ("temperature", "top_p", "min_p")},
        **{name: column(name, np.float32) for name in ("presence", "frequency", "repetition")},
        top_k=column("top_k", np.int32),
        bias_ids=padded([one.bias.keys() for one in params], 6, np.int32, -1),
        bias_values=padded([one.bias.values() for one in params], 6, np.float32, 0),
        allowed_ids=padded([one.allowed for one in params], 8, np.int32, -1),
    )
    counted = jnp.asarray(np.stack([counts(one, vocab) for one in params]))
    state = RowState(length=column("position", np.int32), counts=counted, rules=rules)
    masks = np.stack([mask_words(one.mask, vocab) for one in params])
    return state, jnp.asarray(masks), jnp.asarray(np.array([one.flags for one in params], np.int32))


def with_rules(slots: SlotState, **changed) -> SlotState:
    """Every slot's rules, some of them replaced: [S+1, ...] each, or one value for all."""
    rules = unpack_rules(slots.rules, slots.shape)
    old = {name: getattr(rules, name) for name in changed}
    new = {name: jnp.broadcast_to(jnp.asarray(changed[name], old[name].dtype), old[name].shape) for name in changed}
    return slots.replace(rules=pack_rules(rules.replace(**new)))


def counts(params: Params, vocab: int) -> np.ndarray:
    out = np.bincount(np.array(params.output, np.int64), minlength=vocab).astype(np.int32)
    out[list(set(params.prompt))] += SEEN_IN_PROMPT
    return out


def mask_words(mask: np.ndarray | None, vocab: int) -> np.ndarray:
    """[V] bool -> [ceil(V/32)] uint32; a row without a mask gets zeros, which must not matter."""
    words = -(-vocab // 32)
    if mask is None:
        return np.zeros(words, np.uint32)
    bits = np.zeros(words * 32, np.uint8)
    bits[:vocab] = mask
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def ruled(logits: np.ndarray, params: Params) -> np.ndarray:
    """[V] float64: everything before temperature."""
    out = logits.astype(np.float64)
    seen = np.isin(np.arange(len(out)), params.prompt + params.output)
    out = np.where(seen, np.where(out > 0, out / params.repetition, out * params.repetition), out)
    for token in params.output:
        out[token] -= params.frequency
    for token in set(params.output):
        out[token] -= params.presence
    for token, value in params.bias.items():
        out[token] += value
    if params.allowed:
        out[~np.isin(np.arange(len(out)), params.allowed)] = -np.inf
    if params.position < params.min_len:
        out[list(params.stop_ids)] = -np.inf
    if params.mask is not None:
        out[~params.mask] = -np.inf
    return out


def probabilities(logits: np.ndarray, params: Params) -> np.ndarray:
    """[V] float64: the distribution a sampled row is drawn from."""
    scaled = ruled(logits, params) / params.temperature
    mass = np.exp(scaled - scaled.max())
    mass /= mass.sum()
    mass = np.where(mass < params.min_p * mass.max() * (1 - 1e-9), 0, mass)
    if 0 < params.top_k < len(mass):
        mass = np.where(mass < np.sort(mass)[-params.top_k], 0, mass)
    mass /= mass.sum()
    if params.top_p < 1:
        above = np.array([mass[mass > own * (1 + 1e-9)].sum() for own in mass])
        mass = np.where(above >= params.top_p, 0, mass)
    return mass / mass.sum()


def border_gap(logits: np.ndarray, params: Params) -> float:
    """How near min-p or top-p come to deciding otherwise: below this, float32 may differ from float64."""
    scaled = ruled(logits, params) / params.temperature
    mass = np.exp(scaled - scaled.max())
    gap = np.inf
    if params.min_p:
        gap = min(gap, np.abs(mass - params.min_p).min())
    if params.top_p < 1:
        left = probabilities(logits, Params(**{**vars(params), "top_p": 1.0}))
        above = np.array([left[left > own * (1 + 1e-9)].sum() for own in left])
        gap = min(gap, np.abs(above - params.top_p).min())
    return gap
