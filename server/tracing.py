"""One OpenTelemetry span a call, made from its record when it is over.

Needs the packages of the extra `jaxserve[tracing]`; without `--otlp-endpoint` nothing of them is imported.  Attribute
names are those of OpenTelemetry's conventions for generative models, as vLLM has them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from server.records import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

FLUSH_MILLIS = 3_000  # for the last spans, when the process ends
EVENTS = (("queued", "arrived"), ("prefill", "admitted"), ("decode", "first_token"), ("ended", "ended"))


class Tracer:
    """`observe` a record, and at the end `close`.  ValueError naming the extra when its packages are not there."""

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None):
        """endpoint: of an OTLP collector over gRPC, http://host:4317 (plain) or https://host:4317 (TLS)."""
        self._provider = _provider(endpoint, exporter)
        self._tracer = self._provider.get_tracer("jaxserve")

    def observe(self, record: Record) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        to_epoch = time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return int((moment + to_epoch) * 1e9)

        headers = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        parent = TraceContextTextMapPropagator().extract({key: value for key, value in headers.items() if value})
        span = self._tracer.start_span(
            record.route,
            context=parent,
            kind=SpanKind.SERVER,
            start_time=nanoseconds(record.began),
            attributes=attributes_of(record),
        )
        for index, times in enumerate(record.times):
            for name, field in EVENTS:
                moment: float | None = getattr(times, field)
                if moment is not None:
                    span.add_event(name, {"sequence": index}, timestamp=nanoseconds(moment))
        if is_failure(record):
            span.set_status(Status(StatusCode.ERROR, record.status))
        span.end(nanoseconds(record.ended))

    def close(self) -> None:
        """Sends what waits, for a few seconds at most."""
        self._provider.force_flush(FLUSH_MILLIS)
        self._provider.shutdown()


def attributes_of(record: Record) -> dict[str, str | int | float]:
    """Seconds where a name does not say otherwise; of several sequences the earliest."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.latency.e2e": record.ended - record.began,
        "rpc.system" if record.front == "grpc" else "network.protocol.name": record.front,
        "jaxserve.status": record.status,
    }
    if record.x_request_id:
        attributes["http.request.header.x-request-id"] = record.x_request_id
    if record.request_ids:
        attributes["gen_ai.request.id"] = record.request_ids[0]
        attributes["gen_ai.usage.prompt_tokens"] = record.prompt_tokens
        attributes["gen_ai.usage.completion_tokens"] = record.completion_tokens
        attributes["gen_ai.usage.cached_tokens"] = record.cached_tokens
    if record.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = ",".join(record.finish_reasons)
    queues = [times.admitted - times.arrived for times in record.times if times.admitted is not None]
    firsts = [times.first_token - times.arrived for times in record.times if times.first_token is not None]
    if queues:
        attributes["gen_ai.latency.time_in_queue"] = min(queues)
    if firsts:
        attributes["gen_ai.latency.time_to_first_token"] = min(firsts)
    return attributes


def is_failure(record: Record) -> bool:
    """The server's own fault, as the conventions for server spans have it."""
    if record.front == "http":
        return record.status >= "500"
    return record.status in ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


def _provider(endpoint: str, exporter: SpanExporter | None) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ImportError as error:
        raise ValueError(
            f"otlp_endpoint={endpoint!r} needs OpenTelemetry: pip install 'jaxserve[tracing]' ({error})"
        ) from None
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"otlp_endpoint={endpoint!r} must begin with http:// or https://, e.g. http://localhost:4317")
    provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    else:
        sender = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        provider.add_span_processor(BatchSpanProcessor(sender))
    return provider
