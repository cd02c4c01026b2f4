"""What `/metrics` says: Prometheus' own parser reads it, names are kept, counters never fall, nobody's text is in it."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.metrics import TOKEN_SECONDS, Histogram
from jaxserve.request import Request, SamplingParams
from jaxserve.sched.counters import Counters
from server.metrics import Exposition, accepted_positions, histogram
from tests.server.serving import until
from tests.server.stub import ANSWER, StubEngine

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# What dashboards, the page and the gateway's endpoint picker read.
PROMISED = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "request_success_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total", "cache_config_info", "compiles_total",
    "nan_rows_total", "step_host_seconds_bucket", "step_device_wait_seconds_bucket", "prefill_tokens_total",
    "prefill_padding_tokens_total",
}  # fmt: skip


def samples_of(exposition: Exposition) -> Samples:
    body, content_type = exposition.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def ask(engine: StubEngine, name: str, prompt: str = "a secret prompt", **params) -> None:
    request = Request(id=name, prompt_ids=tuple(prompt.encode()), params=SamplingParams(**params))
    list(engine.submit(request))


@pytest.fixture
def served():
    engine, exposition = StubEngine(), Exposition()
    engine.start()
    exposition.attach(engine)
    yield engine, exposition
    engine.stop()


def test_every_promised_name_is_there(served) -> None:
    names = {name for name, _ in samples_of(served[1])}
    assert {f"jaxserve:{name}" for name in PROMISED} <= names
    assert {"process_resident_memory_bytes", "process_open_fds"} <= names


def test_a_server_that_still_loads_tells_its_process_alone() -> None:
    names = {name for name, _ in samples_of(Exposition())}
    assert "process_resident_memory_bytes" in names and not any(name.startswith("jaxserve:") for name in names)


def test_requests_are_counted_by_how_they_end(served) -> None:
    engine, exposition = served
    ask(engine, "a")
    ask(engine, "b", max_tokens=3, n=2)
    handle = engine.submit(Request(id="c", prompt_ids=(1,), params=SamplingParams(ignore_eos=True)))
    next(iter(handle))
    handle.abort()
    until(lambda: engine.running == 0)
    found = samples_of(exposition)
    ended = {reason: found["jaxserve:request_success_total", (("finished_reason", reason),)]
             for reason in ("stop", "length", "abort", "error")}  # fmt: skip
    assert ended == {"stop": 1, "length": 2, "abort": 1, "error": 0}
    answer = len(ANSWER.encode()) + 1
    assert found["jaxserve:request_generation_tokens_sum", ()] == answer + 2 * 3
    assert found["jaxserve:request_generation_tokens_count", ()] == 3
    assert found["jaxserve:time_to_first_token_seconds_count", ()] == 4
    assert found["jaxserve:request_queue_time_seconds_count", ()] == 4
    assert found["jaxserve:generation_tokens_total", ()] >= answer + 2 * 3 + 1
    assert found["jaxserve:prompt_tokens_total", ()] == 15 + 2 * 15 + 1


def test_buckets_are_cumulative_and_end_with_the_count(served) -> None:
    engine, exposition = served
    ask(engine, "a", max_tokens=20, ignore_eos=True)
    found = samples_of(exposition)
    buckets = [value for (name, _), value in found.items() if name == "jaxserve:inter_token_latency_seconds_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == 19
    assert found["jaxserve:inter_token_latency_seconds_count", ()] == 19


def test_values_fall_into_the_buckets_of_prometheus_own_histogram() -> None:
    registry = CollectorRegistry()
    theirs = prometheus_client.Histogram("h", "h", buckets=TOKEN_SECONDS, registry=registry)
    ours = Histogram(TOKEN_SECONDS)
    for value in (*TOKEN_SECONDS, 0.0, 1e-9, 0.0123, 39.9999, 40.0001, 1e9):  # borders among them
        theirs.observe(value)
        ours.observe(value)
    (family,) = [family for family in registry.collect() if family.name == "h"]
    wanted = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    found = {(s.name, s.labels.get("le")): s.value for s in histogram("h", "h", ours.read()).samples}
    as_numbers = lambda samples: {(name, le and float(le)): value for (name, le), value in samples.items()}  # noqa: E731
    del wanted["h_created", None]
    assert as_numbers(found) == as_numbers(wanted)


def test_accepted_drafts_are_told_by_position() -> None:
    totals = Counters()
    for accepted in (0, 1, 3, 3):  # of proposals of three
        totals.count_proposal(3, accepted)
    found = {sample.labels["position"]: sample.value for sample in accepted_positions(totals).samples}
    assert found == {"0": 3, "1": 2, "2": 2}
    assert (totals.drafts, totals.drafted_tokens, totals.accepted_tokens) == (4, 12, 7)


def test_the_pool_is_told_as_the_gateway_protocol_wants_it(served) -> None:
    engine, exposition = served
    engine.hold()
    handle = engine.submit(Request(id="a", prompt_ids=(1, 2)))
    found = samples_of(exposition)
    (labels,) = [dict(labels) for name, labels in found if name == "jaxserve:cache_config_info"]
    assert labels["block_size"] == "64" and labels["num_gpu_blocks"] == "64"
    assert found["jaxserve:kv_cache_usage_perc", ()] == 1 / 64
    engine.release()
    list(handle)


def test_no_caller_s_words_are_in_it(served) -> None:
    engine, exposition = served
    ask(engine, "an-id-of-a-caller", prompt="whisper", stop=["psst"])
    body, _ = exposition.render()
    assert not any(word in body for word in (b"an-id-of-a-caller", b"whisper", b"psst", b"Paris"))


def test_openmetrics_is_spoken_to_those_who_ask(served) -> None:
    body, content_type = served[1].render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")
