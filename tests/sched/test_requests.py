"""What one caller may rely on: what is refused, how a request ends, what comes with its chunks."""

from __future__ import annotations

import pytest

from jaxserve.request import ErrorCode, FinishReason, RequestError
from jaxserve.sched.plan import Cut, Outcome, RowOutcome
from jaxserve.sched.scheduler import Scheduler
from tests.sched.harness import EOS, VOCAB, Loop, expected, make_config, make_request, some_prompt
from tests.sched.traces import EveryToken

DRAFTS = pytest.mark.parametrize("num_drafts", [0, 3])


def refusal(loop: Loop, name: str, prompt, **options) -> RequestError:
    with pytest.raises(RequestError) as caught:
        loop.ask(name, prompt, **options)
    loop.scheduler.check()
    return caught.value


def test_an_empty_prompt_is_refused_and_its_neighbours_are_unharmed():
    loop = Loop()
    loop.ask("before", some_prompt(5))
    error = refusal(loop, "empty", ())
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "prompt")
    loop.ask("after", some_prompt(6))
    loop.run()
    loop.verify()
    assert len(loop.streams) == 2


@pytest.mark.parametrize("length", [48, 49, 500])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(length):
    error = refusal(Loop(), "long", some_prompt(length))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "prompt")
    assert str(length) in error.message
    assert "48" in error.message


def test_the_longest_prompt_gets_one_token():
    loop = Loop()
    loop.ask("r", some_prompt(47), ignore_eos=True)
    loop.run()
    loop.verify()
    assert len(loop.streams["r", 0].token_ids) == 1


def test_an_id_in_use_is_refused_and_free_again_after_the_end():
    scheduler = Scheduler(make_config(), EOS)
    scheduler.add(make_request("r", some_prompt(3), n=2), 0.0)
    with pytest.raises(RequestError) as caught:
        scheduler.add(make_request("r", some_prompt(4)), 0.0)
    assert (caught.value.code, caught.value.field) == (ErrorCode.ALREADY_EXISTS, "id")
    assert scheduler.abort("r")
    scheduler.add(make_request("r", some_prompt(4)), 0.0)
    assert len(scheduler.drain()) == 2


def test_a_full_queue_answers_resource_exhausted_with_numbers_and_counts_samples():
    loop = Loop(make_config(queue_limit=5))
    loop.ask("a", some_prompt(5), n=3)
    error = refusal(loop, "b", some_prompt(5), n=3)
    assert error.code is ErrorCode.RESOURCE_EXHAUSTED
    assert all(number in error.message for number in ("3", "5"))
    loop.ask("c", some_prompt(5), n=2)
    loop.run()
    loop.verify()


def test_running_sequences_do_not_fill_the_queue():
    loop = Loop(make_config(queue_limit=4))
    loop.ask("a", some_prompt(4), n=4, max_tokens=20, ignore_eos=True)
    while loop.scheduler.load().waiting:
        loop.step()
    loop.ask("b", some_prompt(4, 1), n=4)
    assert (loop.scheduler.load().running, loop.scheduler.load().waiting) == (4, 4)
    loop.run()
    loop.verify()


@DRAFTS
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 5])
def test_length_stops_are_never_late(max_tokens, num_drafts):
    """Rule 2: not one row is computed past max_tokens."""
    loop = Loop(make_config(num_drafts=num_drafts))
    loop.ask("r", some_prompt(5), max_tokens=max_tokens, ignore_eos=True)
    loop.run()
    loop.verify()
    assert loop.streams["r", 0].last.finish_reason is FinishReason.LENGTH
    rows = loop.scheduler.load().totals.decode_rows
    assert rows <= max(max_tokens - 1, 0)
    assert num_drafts or rows == max(max_tokens - 1, 0)


@DRAFTS
def test_every_end_of_sequence_id_ends_and_is_masked_until_min_tokens(num_drafts):
    loop = Loop(make_config(num_drafts=num_drafts))
    for seed in range(24):
        loop.ask(f"r{seed}", some_prompt(4), seed=seed, min_tokens=6, stop_token_ids=range(10))
        loop.step()
    loop.run()
    loop.verify()
    streams = list(loop.streams.values())
    assert all(len(stream.token_ids) > 6 for stream in streams)
    assert {stream.last.stop_reason for stream in streams} > {None}, "both kinds of stop are met"
    loads = [load for plan in loop.plans for load in plan.loads]
    assert all(set(load.stop_ids) == {*range(10), *EOS} and load.min_len == 10 for load in loads)


def one_stop(token_ids, *, cut=None, eos=False, **params):
    """Ends a request by hand: its first token, then a step that draws `token_ids`."""
    scheduler = Scheduler(make_config(num_drafts=3), EOS)
    scheduler.add(make_request("r", some_prompt(3), **params), 0.0)
    first = scheduler.schedule(0.0)
    scheduler.commit(first, Outcome((RowOutcome((1,)),)), {}, 0.0)
    plan = scheduler.schedule(0.0)
    outcome = Outcome((RowOutcome(tuple(token_ids), drafted=3),))
    return scheduler.commit(plan, outcome, {0: cut} if cut else {}, 0.0)[0], scheduler


@pytest.mark.parametrize(
    ("tokens", "params", "cut", "kept", "stop_reason"),
    [
        ((5, EOS[1], 7, 8), {}, None, (5, EOS[1]), None),
        ((5, 6, 7), {"stop_token_ids": [6]}, None, (5, 6), 6),
        ((5, EOS[0], 6), {"stop_token_ids": [6], "ignore_eos": True}, None, (5, EOS[0], 6), 6),
        ((5, 6, EOS[0]), {}, Cut(2, "END"), (5, 6), "END"),
        ((5, EOS[0], 6), {}, Cut(3, "END"), (5, EOS[0]), None),
        ((5, 6), {"stop_token_ids": [6]}, Cut(2, "END"), (5, 6), "END"),
    ],
)
def test_the_earliest_stop_wins_is_counted_and_nothing_after_it(tokens, params, cut, kept, stop_reason):
    chunk, scheduler = one_stop(tokens, cut=cut, **params)
    assert (chunk.token_ids, chunk.stop_reason, chunk.finish_reason) == (kept, stop_reason, FinishReason.STOP)
    assert chunk.usage.completion_tokens == 1 + len(kept)
    assert chunk.usage.accepted_tokens == min(len(kept), len(tokens) - 1)
    assert scheduler.load().totals.output_tokens == 1 + len(kept)
    written = 3 + 1 + len(kept) - 1
    assert scheduler.load().pages_cached == written // 4, "what stands behind the stop is not cached"


def test_a_stop_id_before_min_tokens_does_not_end():
    chunk, _ = one_stop((6, 7), stop_token_ids=[6], min_tokens=2)
    assert (chunk.token_ids, chunk.finish_reason) == ((6, 7), None)


@DRAFTS
def test_samples_are_n_streams_with_their_own_seeds_under_one_id(num_drafts):
    loop = Loop(make_config(num_drafts=num_drafts))
    request = loop.ask("r", some_prompt(18), n=6, seed=5, max_tokens=12, ignore_eos=True, prompt_logprobs=None)
    loop.run()
    loop.verify()
    answers = {loop.streams["r", index].token_ids for index in range(6)}
    assert len(answers) == 6
    alone = Loop()
    alone.ask("r", request.prompt_ids, seed=5, max_tokens=12, ignore_eos=True)
    alone.run()
    assert alone.streams["r", 0].token_ids == loop.streams["r", 0].token_ids
    assert all(stream.last.seed == 5 for stream in loop.streams.values())


def test_aborting_a_request_ends_all_its_samples_once():
    loop = Loop()
    loop.ask("r", some_prompt(9), n=6, max_tokens=30, ignore_eos=True)
    for _ in range(5):
        loop.step()
    assert loop.scheduler.abort("r")
    assert not loop.scheduler.abort("r")
    assert not loop.scheduler.abort("unknown")
    loop.run()
    loop.verify()
    assert {stream.last.finish_reason for stream in loop.streams.values()} == {FinishReason.ABORT}


def test_a_passed_deadline_aborts_and_says_so():
    loop = Loop()
    loop.ask("late", some_prompt(9), deadline=0.105, n=2, ignore_eos=True)
    loop.ask("calm", some_prompt(9), deadline=500.0, ignore_eos=True)
    loop.run()
    loop.verify()
    late = loop.streams["late", 0].last
    assert late.finish_reason is FinishReason.ABORT
    assert late.error.startswith("deadline")
    assert loop.streams["calm", 0].last.finish_reason is FinishReason.LENGTH


def test_a_dead_loop_fails_every_stream_once():
    loop = Loop()
    for i in range(7):
        loop.ask(f"r{i}", some_prompt(6, i), n=2, ignore_eos=True)
    for _ in range(6):
        loop.step()
    loop.scheduler.abort("r1")
    chunks = loop.scheduler.fail_all("the device is gone")
    for chunk in chunks:
        loop.streams[chunk.request_id, chunk.index].receive(chunk)
    assert all(stream.is_ended for stream in loop.streams.values())
    assert {chunk.error for chunk in chunks if chunk.request_id != "r1"} == {"the device is gone"}
    assert not loop.scheduler.has_unfinished
    assert loop.scheduler.load().pages_held == 0
    loop.scheduler.check()


def test_a_nan_row_ends_with_an_error_and_its_pages_leave_the_table():
    loop = Loop()
    loop.ask("bad", some_prompt(20))
    loop.poison(loop.streams["bad", 0], 2)
    loop.run()
    assert loop.streams["bad", 0].last.finish_reason is FinishReason.ERROR
    assert "NaN" in loop.streams["bad", 0].last.error
    assert loop.scheduler.load().totals.nan_rows == 1
    assert loop.scheduler.load().pages_cached == 0
    loop.ask("good", some_prompt(20))
    loop.run()
    loop.verify()
    assert loop.streams["good", 0].last.usage.cached_tokens == 0


def test_masked_rows_are_marked_and_run_ahead_like_others():
    loop = Loop()
    loop.ask("masked", some_prompt(20), max_tokens=9, make_mask=EveryToken, ignore_eos=True)
    loop.ask("plain", some_prompt(20, 1), max_tokens=9, ignore_eos=True)
    loop.run()
    loop.verify()
    rows = [row for plan in loop.plans for row in plan.rows]
    assert all(row.masked == (row.sequence == 0 and row.takes_token) for row in rows)
    assert sum(row.masked for row in rows) == 9
    assert [plan.is_masked for plan in loop.plans] == [any(row.masked for row in plan.rows) for plan in loop.plans]


def test_the_loop_sees_which_tokens_count_and_that_a_row_is_stale():
    scheduler = Scheduler(make_config(num_drafts=3), EOS)
    scheduler.add(make_request("r", some_prompt(3)), 0.0)
    (row,) = scheduler.schedule(0.0).rows
    assert scheduler.current(row).ending((4, EOS[0], 5), None).keep == 2
    scheduler.roster.preempt(scheduler.current(row))
    assert scheduler.current(row) is None
    (row,) = scheduler.schedule(0.0).rows
    assert scheduler.current(row) is not None
    scheduler.abort("r")
    assert scheduler.current(row) is None


@DRAFTS
@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize("start", [0, 1, 9, 13, 20, 99])
def test_prompt_logprobs_are_complete_whatever_the_chunks_hits_and_preemptions(start, chunk, num_drafts):
    """Checked entry by entry against the plain run; the hit before the start is still used (fault 32)."""
    loop = Loop(make_config(num_drafts=num_drafts, num_pages=15, prefill_buckets=((2, chunk),)))
    loop.ask("first", some_prompt(20), max_tokens=2, ignore_eos=True)
    loop.run()
    scored = {"prompt_logprobs": 0, "prompt_logprobs_start": start}
    for i in range(4):
        loop.ask(f"r{i}", some_prompt(20), n=2, max_tokens=22, ignore_eos=True, priority=i % 2, **scored)
    loop.run()
    loop.verify()
    assert loop.scheduler.load().totals.preemptions > 0
    hit = loop.streams["r1", 0].last.usage.cached_tokens
    assert hit == min((start - 1) // 4, 4) * 4 if start > 0 else hit == 0


@DRAFTS
def test_max_tokens_0_scores_the_prompt_and_draws_nothing(num_drafts):
    loop = Loop(make_config(num_drafts=num_drafts))
    request = loop.ask("r", some_prompt(37), max_tokens=0, prompt_logprobs=0, n=2)
    loop.run()
    loop.verify()
    (chunk,) = loop.streams["r", 1].chunks
    assert chunk.finish_reason is FinishReason.LENGTH
    assert chunk.token_ids == ()
    assert chunk.prompt_logprobs == expected(request, 1, 48).prompt_logprobs
    assert not any(row.takes_token for plan in loop.plans for row in plan.rows)


def test_salts_share_nothing():
    loop = Loop()
    for i, salt in enumerate(("", "a", "b", "a")):
        loop.ask(f"r{i}", some_prompt(17), salt=salt)
        loop.run()
    loop.verify()
    cached = [stream.last.usage.cached_tokens for stream in loop.streams.values()]
    assert cached == [0, 0, 0, 16]


def test_buckets_that_cannot_serve_are_refused_at_start():
    for changes, name in (
        ({"decode_buckets": (2,)}, "decode_buckets"),
        ({"prefill_buckets": ()}, "prefill_buckets"),
        ({"prefill_seconds": (0.1,)}, "prefill_seconds"),
    ):
        with pytest.raises(ValueError, match=name):
            Scheduler(make_config(**changes), EOS)
    with pytest.raises(ValueError, match="fewer than one"):
        make_config(num_pages=12)
    assert max(EOS) < VOCAB
