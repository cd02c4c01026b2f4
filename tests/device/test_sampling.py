"""The sampler against a float64 oracle, against statistics, and against itself in other company."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxserve.device import sampling
from jaxserve.device.noise import gumbel
from jaxserve.device.slots import empty_slots, rows_of
from jaxserve.device.state import SEEN_IN_PROMPT, RowFlag, SlotShape
from tests.device.oracle import EVERYTHING, Params, border_gap, make_rows, probabilities, ruled, with_rules

VOCAB = 45  # no multiple of 32
ROWS = 8  # few shapes, few compiles: smaller batches are padded with greedy rows
MANY, FEW = 100_000, 2000

# Eight rows of twenty parameters shrink for minutes; the failing row is printed as it is.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)

compiled_draw = jax.jit(sampling.draw)


def draw(logits: np.ndarray, params: list[Params], *, pad: bool = True, all_rules: bool = False) -> sampling.Drawn:
    """[R, V] -> numpy Drawn; `all_rules` runs every rule for every row (a late mask needs its own row's word)."""
    count, vocab = logits.shape
    if pad and count < ROWS:
        logits = np.concatenate([logits, np.zeros((ROWS - count, vocab))])
        params = params + [Params()] * (ROWS - count)
    rows, mask, flags = make_rows(params, vocab)
    if all_rules:
        masks = [np.ones(vocab, bool) if one.mask is None else one.mask for one in params]
        mask = make_rows([replace(one, mask=m) for one, m in zip(params, masks, strict=True)], vocab)[1]
        flags = jnp.full_like(flags, EVERYTHING)
    drawn = compiled_draw(jnp.asarray(logits, jnp.float32), rows, mask, flags)
    return jax.tree.map(lambda field: np.asarray(field)[:count], drawn)


def widened(logits: np.ndarray) -> np.ndarray:
    """[..., n] -> [..., VOCAB]: ids that cannot be drawn fill it up."""
    return np.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, VOCAB - logits.shape[-1])], constant_values=-np.inf)


def draws(logits: np.ndarray, params: Params, count: int, *, one_sequence: bool = False) -> np.ndarray:
    """`count` draws of one row, each with a seed of its own or each at a position of its own: [count] ids."""
    few = make_rows([params], VOCAB)
    rows, mask, flags = jax.tree.map(lambda field: jnp.repeat(field, count, axis=0), few)
    at = jnp.arange(count, dtype=jnp.int32)
    if one_sequence:
        rows = rows.replace(length=at)
    else:
        seeds = np.random.default_rng(7).integers(0, 2**32, (count, 2), np.uint32)
        rules = rows.rules.replace(seed=jnp.asarray(seeds))
        rows = rows.replace(rules=rules, length=rows.length + at % 50)
    many = jnp.broadcast_to(jnp.asarray(widened(logits), jnp.float32), (count, VOCAB))
    return np.asarray(compiled_draw(many, rows, mask, flags).token)


def spread(rows: int, vocab: int = VOCAB, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * 3


ids = st.integers(0, VOCAB - 1)
some_ids = st.lists(ids, max_size=4).map(tuple)
any_params = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, VOCAB, VOCAB + 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    presence=st.sampled_from([0.0, 0.7, -1.5, 2.0]),
    frequency=st.sampled_from([0.0, 0.4, -0.9]),
    repetition=st.sampled_from([1.0, 1.3, 0.6]),
    bias=st.dictionaries(ids, st.sampled_from([-100.0, -2.5, 3.5, -np.inf]), max_size=3),
    allowed=st.lists(ids, max_size=8, unique=True).map(tuple),
    stop_ids=st.lists(ids, max_size=3, unique=True).map(tuple),
    min_len=st.integers(0, 12),
    mask=st.none() | st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB).map(np.array),
    prompt=some_ids,
    output=some_ids,
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.booleans(),
)


@settings(max_examples=60, phases=NO_SHRINKING)
@given(params=st.lists(any_params, min_size=ROWS, max_size=ROWS), seed=st.integers(0, 1000))
def test_every_rule_acts_as_in_float64_and_in_order(params, seed):
    logits = spread(ROWS, seed=seed)
    drawn = draw(logits, params)
    for row, one in enumerate(params):
        processed = ruled(logits[row], one)
        if not np.isfinite(processed.max()):
            assert drawn.is_nan[row], "nothing left to draw ends with an error"
            continue
        assert not drawn.is_nan[row]
        scores = processed
        if one.temperature > 0:
            noise = gumbel(
                jnp.array([[one.seed & 0xFFFFFFFF, one.seed >> 32]], jnp.uint32), jnp.array([one.position]), VOCAB
            )
            kept = probabilities(logits[row], one) > 0
            scores = np.where(kept, processed / one.temperature + np.asarray(noise[0], np.float64), -np.inf)
            if border_gap(logits[row], one) < 1e-5:
                continue
        second, first = np.sort(scores)[-2:]
        if first - second > 1e-4:
            assert drawn.token[row] == scores.argmax(), one


@settings(max_examples=40, phases=NO_SHRINKING)
@given(params=st.lists(any_params, min_size=ROWS, max_size=ROWS), seed=st.integers(0, 1000))
def test_a_rule_that_runs_for_a_mate_changes_no_token(params, seed):
    logits = spread(ROWS, seed=seed)
    gated, ungated = draw(logits, params), draw(logits, params, all_rules=True)
    np.testing.assert_array_equal(gated.token, ungated.token)
    np.testing.assert_array_equal(gated.is_nan, ungated.is_nan)
    asked = np.array([one.logprobs for one in params]).any()
    for name in ("logprob", "rank", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(gated, name), getattr(ungated, name) * asked)


@settings(max_examples=15, phases=NO_SHRINKING)
@given(params=st.lists(any_params, min_size=ROWS, max_size=ROWS), seed=st.integers(0, 1000))
def test_a_row_alone_draws_the_token_it_draws_among_others(params, seed):
    logits = spread(ROWS, seed=seed)
    together = draw(logits, params)
    backwards = draw(logits[::-1], params[::-1])
    for row, one in enumerate(params):
        alone = draw(logits[row : row + 1], [one], pad=False)
        assert alone.token[0] == together.token[row] == backwards.token[ROWS - 1 - row]
        assert alone.is_nan[0] == together.is_nan[row]


def test_rows_worked_on_in_groups_draw_what_one_row_alone_draws():
    vocab = 49152  # SmolLM2's: 16 rows are two groups on CPU
    logits = spread(16, vocab)
    params = [
        Params(temperature=0.9, top_k=40 * (row % 2), top_p=1 - 0.1 * (row % 3), seed=row, length=100 + row)
        for row in range(15)
    ]
    params.append(Params(logprobs=True))
    together = draw(logits, params)
    for row in (0, 5, 8, 15):
        assert draw(logits[row : row + 1], [params[row]], pad=False).token[0] == together.token[row]
    assert together.token[15] == logits[15].argmax()


# name -> parameters; the tokens drawn before matter to the penalties
DISTRIBUTIONS = {
    "plain": Params(temperature=1.0),
    "cold": Params(temperature=0.5),
    "hot": Params(temperature=2.0),
    "top_k": Params(temperature=1.0, top_k=4),
    "top_p": Params(temperature=1.0, top_p=0.8),
    "small top_p": Params(temperature=2.0, top_p=0.3),
    "min_p": Params(temperature=1.0, min_p=0.15),
    "all three": Params(temperature=1.3, top_k=6, top_p=0.85, min_p=0.05),
    "top_p of what top_k left": Params(temperature=2.0, top_k=5, top_p=0.7),
    "penalties": Params(temperature=1.0, presence=0.5, frequency=0.3, repetition=1.4, prompt=(1, 2), output=(2, 3, 3)),
    "bias and bans": Params(temperature=1.0, bias={0: 1.5, 4: -np.inf}, top_p=0.9),
    "allowed": Params(temperature=1.0, allowed=(1, 3, 8)),
}
LOGITS = np.array([1.2, -0.4, 0.3, 2.1, -1.0, 0.9, 1.9, -2.2, 0.1, 0.6])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_tokens_are_drawn_with_exactly_their_probability(name):
    logits, params = widened(LOGITS), DISTRIBUTIONS[name]
    expected = probabilities(logits, params) * MANY
    seen = np.bincount(draws(logits, params, MANY), minlength=VOCAB)
    assert not seen[expected == 0].any(), "a token that is not kept was drawn"
    possible = expected > 0
    chi_square = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    # 99.99% of chi-square with 9 degrees of freedom is 33.7; fewer have less
    assert chi_square < 34, (name, seen, expected.round())


def test_one_sequence_draws_by_probability_over_its_positions():
    tokens = draws(LOGITS, Params(temperature=1.0, seed=42), MANY, one_sequence=True)
    expected = probabilities(LOGITS, Params(temperature=1.0))
    assert ((np.bincount(tokens, minlength=10) - expected * MANY) ** 2 / (expected * MANY)).sum() < 34
    pairs = np.bincount(tokens[:-1] * 10 + tokens[1:], minlength=100)
    wanted = np.outer(expected, expected).ravel() * (MANY - 1)
    assert ((pairs - wanted) ** 2 / wanted).sum() < 160, "one position tells of the next"  # 99 degrees: 99.99% is 161


def test_flat_logits_do_not_repeat_one_id():
    tokens = draws(np.zeros(VOCAB), Params(temperature=1.0, seed=3), FEW, one_sequence=True)[:50]
    assert len(set(tokens)) > 20


def test_two_seeds_differ_and_all_64_bits_count():
    seeds = (5, 6, 5 + (1 << 32), 5 + (1 << 63))
    texts = {
        tuple(draws(np.zeros(VOCAB), Params(temperature=1.0, seed=seed), FEW, one_sequence=True)[:20]) for seed in seeds
    }
    assert len(texts) == 4


def test_greedy_takes_the_lowest_id_of_the_best():
    logits = np.array([[0.0, 2.0, 1.0, 2.0], [-1.0, -1.0, -1.0, -1.0]])
    assert draw(widened(logits), [Params(), Params()]).token.tolist() == [1, 0]


def test_presence_and_frequency_count_output_alone_and_repetition_counts_both():
    logits = np.array([2.0, -2.0, 2.0, -2.0, 2.0])
    params = Params(presence=0.5, frequency=0.25, repetition=2.0, prompt=(0, 1, 1), output=(2, 2, 2, 3))
    rows, mask, flags = make_rows([params], 5)
    penalise = dict(sampling.PROCESSORS)[RowFlag.PENALTIES]
    got = penalise(jnp.asarray(logits[None], jnp.float32), sampling.RowInputs(state=rows, mask=mask, flags=flags))
    assert np.asarray(got[0]).tolist() == [1.0, -4.0, 1.0 - 0.5 - 0.75, -4.0 - 0.5 - 0.25, 2.0]


def test_penalties_come_before_bias_and_bans_after_both():
    logits = widened(np.array([[2.0, 3.0, 1.0]]))
    params = Params(repetition=2.0, prompt=(0,), bias={0: 3.0})  # 2 / 2 + 3, not (2 + 3) / 2
    assert draw(logits, [params]).token[0] == 0
    assert draw(logits, [replace(params, allowed=(1, 2))]).token[0] == 1
    assert draw(logits, [replace(params, bias={0: 3.0, 1: -np.inf}, allowed=(1, 2))]).token[0] == 2


def test_every_token_accepted_in_one_step_counts():
    rows, _, _ = make_rows([Params(prompt=(1,), output=(2,)), Params(prompt=(3,))], 5)
    for tokens, takes in (([2, 4], [True, True]), ([1, 3], [True, False]), ([2, 0], [True, False])):
        rows = sampling.record(rows, jnp.array(tokens), jnp.array(takes))
    assert np.asarray(rows.length).tolist() == [5, 2]
    assert np.asarray(rows.counts).tolist() == [[0, SEEN_IN_PROMPT + 1, 3, 0, 0], [0, 0, 0, SEEN_IN_PROMPT, 1]]


def test_a_scan_that_records_draws_what_plain_steps_draw():
    logits = jnp.asarray(spread(4, seed=1)[:, None, :].repeat(2, 1))  # [positions, R, V]
    params = [Params(temperature=1.0, presence=1.0, top_p=0.9, seed=row, prompt=(1, 2)) for row in range(2)]
    rows, mask, flags = make_rows(params, VOCAB)

    def step(rows, at):
        drawn = sampling.draw(at, rows, mask, flags)
        return sampling.record(rows, drawn.token, jnp.array([True, True])), drawn.token

    _, scanned = jax.lax.scan(step, rows, logits)
    for at in range(4):
        token = draw(np.asarray(logits[at]), params).token
        assert token.tolist() == np.asarray(scanned[at]).tolist()
        params = [replace(one, output=(*one.output, int(new))) for one, new in zip(params, token, strict=True)]


@pytest.mark.parametrize("off", [Params(top_k=0), Params(top_k=VOCAB), Params(top_k=10**9), Params(top_p=1.0)])
def test_a_rule_that_is_off_changes_no_draw(off):
    logits = spread(1)[0]
    plain = draws(logits, Params(temperature=3.0), FEW)
    assert (draws(logits, replace(off, temperature=3.0), FEW) == plain).all()


def test_top_k_of_one_and_a_tiny_top_p_are_greedy():
    logits = spread(4)
    for params in (
        Params(temperature=5.0, top_k=1),
        Params(temperature=5.0, top_p=1e-6),
        Params(temperature=5.0, min_p=1.0),
    ):
        assert (draw(logits, [replace(params, seed=row) for row in range(4)]).token == logits.argmax(-1)).all()


def test_a_tiny_temperature_is_greedy_and_overflows_nothing():
    logits = spread(4) * 100
    for temperature in (1e-6, 2e-38):
        drawn = draw(logits, [Params(temperature=temperature, top_p=0.9, seed=row) for row in range(4)])
        assert (drawn.token == logits.argmax(-1)).all()
        assert not drawn.is_nan.any()


def test_equal_logits_at_the_border_are_kept_together():
    logits = np.array([3.0, 1.0, 1.0, 1.0, 0.0, -1.0])
    assert set(draws(logits, Params(temperature=2.0, top_k=2), FEW)) == {0, 1, 2, 3}
    assert set(draws(logits, Params(temperature=2.0, top_p=0.5), FEW)) == {0, 1, 2, 3}
    assert set(draws(logits, Params(temperature=2.0, top_k=3, top_p=0.999), FEW)) == {0, 1, 2, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [Params(), Params(temperature=1.0, top_k=3, top_p=0.5), Params(allowed=(3, 4))])
def test_a_row_with_nan_ends_alone(bad, params):
    logits = spread(4)
    clean = draw(logits, [params] * 4)
    logits[2, 7] = bad
    drawn = draw(logits, [params] * 4)
    assert drawn.is_nan.tolist() == [False, False, True, False]
    assert 0 <= drawn.token[2] < VOCAB
    assert (drawn.token == clean.token)[[0, 1, 3]].all()


def test_a_row_with_nothing_left_to_draw_says_so():
    banned = Params(temperature=1.0, top_k=2, top_p=0.9, allowed=(3, 4), bias={3: -np.inf, 4: -np.inf})
    masked = Params(mask=np.zeros(VOCAB, bool))
    drawn = draw(spread(3), [banned, masked, Params(temperature=1.0)])
    assert drawn.is_nan.tolist() == [True, True, False]


def test_logits_of_minus_infinity_are_never_drawn():
    logits = np.full((1, VOCAB), -np.inf)
    logits[0, [4, 9]] = 0.0
    assert set(draws(logits[0], Params(temperature=1.0), FEW)) == {4, 9}
    assert set(draws(logits[0], Params(temperature=1.0, top_k=5, top_p=0.99), FEW)) == {4, 9}


def test_stop_ids_are_held_back_until_min_len_and_padding_means_no_id():
    logits = np.arange(VOCAB, dtype=np.float32)[None]  # the last id is the best: where -1 would point
    params = Params(stop_ids=(VOCAB - 2,), min_len=6, length=5)
    assert draw(logits, [params]).token[0] == VOCAB - 1
    params = replace(params, stop_ids=(VOCAB - 1, VOCAB - 2))
    assert draw(logits, [params]).token[0] == VOCAB - 3
    assert draw(logits, [replace(params, length=6)]).token[0] == VOCAB - 1


def test_bias_and_allowed_padding_means_no_id():
    logits = np.arange(VOCAB, dtype=np.float32)[None]
    assert draw(logits, [Params(bias={3: -5.0})]).token[0] == VOCAB - 1
    assert draw(logits, [Params(allowed=(3, 2))]).token[0] == 3
    assert draw(logits, [Params(bias={3: 100.0})]).token[0] == 3


def test_bit_i_of_word_w_allows_id_32_w_plus_i():
    tokens = (0, 1, 31, 32, VOCAB - 1)
    rows, _, flags = make_rows([Params(mask=np.ones(VOCAB, bool))] * len(tokens) + [Params()] * 3, VOCAB)
    words = np.zeros((ROWS, 2), np.uint32)
    for row, token in enumerate(tokens):
        words[row, token // 32] = 1 << (token % 32)
    drawn = np.asarray(compiled_draw(jnp.asarray(spread(ROWS)), rows, jnp.asarray(words), flags).token)
    assert tuple(drawn[:5]) == tokens
    assert (drawn[5:] == spread(ROWS)[5:].argmax(-1)).all(), "a row without a late mask read one"


def test_logprobs_are_those_of_the_raw_logits():
    logits = spread(2)
    params = Params(temperature=0.3, top_k=2, bias={5: 50.0}, logprobs=True)
    drawn = draw(logits, [params, Params()])
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    assert drawn.token[0] == 5
    np.testing.assert_allclose(drawn.logprob, np.take_along_axis(exact, drawn.token[:, None], 1)[:, 0], atol=1e-5)
    assert drawn.rank.tolist() == [1 + (exact[0] > exact[0, 5]).sum(), 1]


def test_rows_are_gathered_by_slot_with_their_rules():
    slots = empty_slots(SlotShape(slots=3, max_len=9, vocab=5, stop_ids=1, biases=1, allowed_ids=1))
    slots = slots.replace(length=jnp.arange(4), counts=slots.counts.at[2, 1].set(7))
    slots = with_rules(slots, top_p=jnp.array([1, 1, 0.5, 0.25]))
    rows = rows_of(slots, jnp.array([2, 0, 3]))
    assert np.asarray(rows.length).tolist() == [2, 0, 3]
    assert np.asarray(rows.rules.top_p).tolist() == [0.5, 1, 0.25]
    assert np.asarray(rows.counts[0]).tolist() == [0, 7, 0, 0, 0]
