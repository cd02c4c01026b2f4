"""A load, from the host's numbers to what a draw reads: every rule in its own field, and nothing of the last owner."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch import pack_load
from jaxserve.device.slots import empty_slots, load_slot, pack_rules, rows_of, unpack_rules
from jaxserve.device.state import SEEN_IN_PROMPT, SlotShape
from jaxserve.request import SamplingParams
from jaxserve.sched.plan import SlotLoad

SHAPE = SlotShape(slots=3, max_len=9, vocab=12, stop_ids=2, biases=4, allowed_ids=3)
PARAMS = SamplingParams(
    temperature=0.7, top_k=4, top_p=0.9, min_p=0.05, presence_penalty=-0.5, frequency_penalty=0.25,
    repetition_penalty=1.3, logit_bias={3: -2.5, 8: 1.5}, banned_token_ids=(6,), allowed_token_ids=(2, 9),
)  # fmt: skip
LOAD = SlotLoad(
    slot=1, tokens=(4, 5, 4, 7, 4), prompt_len=2, limit=8, min_len=6, stop_ids=(1, 11), seed=(5 << 32) + 0xFFFFFFFE,
    params=PARAMS,
)  # fmt: skip


def rules_at(slots, slot: int) -> dict:
    rules = jax.tree.map(lambda rows: np.asarray(rows)[0].tolist(), rows_of(slots, np.array([slot])).rules)
    return vars(rules)


def test_every_rule_of_a_load_reaches_its_own_field():
    found = rules_at(load_slot(empty_slots(SHAPE), pack_load(LOAD, SHAPE)), LOAD.slot)
    top_p, min_p, temperature, repetition = np.array([0.9, 0.05, 0.7, 1.3], np.float32).tolist()
    assert found == {
        "limit": 8, "min_len": 6, "seed": [0xFFFFFFFE, 5], "top_k": 4, "temperature": temperature,
        "top_p": top_p, "min_p": min_p, "presence": -0.5, "frequency": 0.25, "repetition": repetition,
        "stop_ids": [1, 11], "bias_ids": [3, 8, 6, -1], "bias_values": [-2.5, 1.5, -np.inf, 0],
        "allowed_ids": [2, 9, -1],
    }  # fmt: skip


def test_a_load_counts_its_tokens_and_begins_without_keys():
    slots = load_slot(replace(empty_slots(SHAPE), kv_len=jnp.full(4, 7)), pack_load(LOAD, SHAPE))
    counts = np.zeros(12, int)
    counts[[4, 5]] += SEEN_IN_PROMPT
    counts[[4, 7]] += [2, 1]
    assert np.asarray(slots.counts[1]).tolist() == counts.tolist()
    assert np.asarray(slots.tokens[1]).tolist() == [4, 5, 4, 7, 4, 0, 0, 0, 0]
    assert (slots.length[1], slots.kv_len[1]) == (5, 0)


def test_a_load_leaves_nothing_of_the_last_owner_and_touches_no_neighbour():
    fresh = replace(LOAD, tokens=(3,), prompt_len=1, min_len=1, stop_ids=(), params=SamplingParams(temperature=0))
    empty = empty_slots(SHAPE)
    once = load_slot(empty, pack_load(fresh, SHAPE))
    again = load_slot(load_slot(empty, pack_load(LOAD, SHAPE)), pack_load(fresh, SHAPE))
    for name in ("tokens", "length", "kv_len", "counts", "rules"):
        np.testing.assert_array_equal(getattr(again, name), getattr(once, name), err_msg=name)
        others = np.array([0, 2, 3])
        np.testing.assert_array_equal(getattr(again, name)[others], getattr(empty, name)[others], err_msg=name)


def test_rules_survive_packing_bit_for_bit():
    packed = load_slot(empty_slots(SHAPE), pack_load(LOAD, SHAPE)).rules
    np.testing.assert_array_equal(pack_rules(unpack_rules(packed, SHAPE)), packed)


def test_an_empty_slot_changes_no_logits():
    found = rules_at(empty_slots(SHAPE), 0)
    neutral = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "presence": 0, "frequency": 0, "repetition": 1}
    assert {name: found[name] for name in neutral} == neutral
    assert found["bias_ids"] == [-1] * 4 and found["allowed_ids"] == [-1] * 3 and found["stop_ids"] == [-1, -1]
