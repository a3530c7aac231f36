"""A run's traces as OpenTelemetry spans, for a collector that takes OTLP over HTTP: Jaeger, Tempo, those of vendors.

    RUN/trace/<process>.jsonl ──▸ a trace of each process ▸ a span for each lane ▸ the spans in it ──▸ BATCH at a time

Ids are hashes of names and places, so what is sent again has the same ids. Times are those of the queue's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from asyncrl.errors import ConfigError
from asyncrl.observability.timeline import ProcessTrace, Timeline
from asyncrl.observability.trace_export import pieces, taken_spans

BATCH = 512
"""Spans in one request."""

DEADLINE_S = 10.0
"""Of one request, with its retries."""


def send_spans(run_folder: Path, endpoint: str) -> int:
    """Send all spans of a run; how many they are. endpoint: http://collector:4318/v1/traces

    Raises ConfigError (key otlp) if the collector does not take them within DEADLINE_S.
    """
    exporter, timeline, sent = (
        OTLPSpanExporter(endpoint=endpoint, timeout=DEADLINE_S),
        Timeline(run_folder),
        0,
    )
    timeline.find()
    try:
        for trace in timeline.processes.values():
            spans = _spans(run_folder.resolve().name, trace)
            while batch := [*islice(spans, BATCH)]:
                if exporter.export(batch) is not SpanExportResult.SUCCESS:
                    rule = f"took {sent} spans and no more within {DEADLINE_S:g} s"
                    remedy = "give the address of a collector's OTLP over HTTP: http://HOST:4318/v1/traces"
                    raise ConfigError("otlp", endpoint, rule, remedy)
                sent += len(batch)
    finally:
        exporter.shutdown()
    return sent


def _spans(run: str, trace: ProcessTrace) -> Iterator[ReadableSpan]:
    """Spans of one process as they are read, and at the end one for each of its lanes."""
    lanes: dict[str, tuple[SpanContext, float, float, Resource]] = {}
    number = 0
    for more in pieces(trace):
        for lane, span, start, end in taken_spans(trace, ended=more):
            if lane.name not in lanes:
                of_lane = _context(run, trace.name, lane.name)
                lanes[lane.name] = of_lane, start, end, _resource(run, trace)
            context, first, last, resource = lanes[lane.name]
            lanes[lane.name] = context, min(first, start), max(last, end), resource
            number += 1
            own = _context(run, trace.name, lane.name, number)
            about = {name: _attribute(value) for name, value in span.about.items()}
            yield _span(span.name, own, context, resource, about, start, end)
        trace.events.clear()
        trace.figures.clear()
    for name, (context, first, last, resource) in lanes.items():
        yield _span(name, context, None, resource, {}, first, last)


def _span(
    name: str,
    context: SpanContext,
    parent: SpanContext | None,
    resource: Resource,
    attributes: dict[str, Any],
    start: float,
    end: float,
) -> ReadableSpan:
    """start, end: seconds"""
    begun, over = round(1e9 * start), round(1e9 * end)
    return ReadableSpan(name, context, parent, resource, attributes, start_time=begun, end_time=over)


def _resource(run: str, trace: ProcessTrace) -> Resource:
    """The process, by OpenTelemetry's names."""
    names = {"service.name": f"asyncrl-{trace.role}", "service.namespace": run, "host.name": trace.host}
    return Resource({**names, "service.instance.id": trace.name})


def _context(run: str, process: str, lane: str, number: int = 0) -> SpanContext:
    """number: of a span in the lane; 0: the lane's own"""
    whole = int.from_bytes(blake2b(f"{run}\0{process}".encode(errors="replace"), digest_size=16).digest())
    own = blake2b(f"{process}\0{lane}\0{number}".encode(errors="replace"), digest_size=8).digest()
    return SpanContext(
        whole, int.from_bytes(own), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _attribute(value: Any) -> str | int | float:
    """OTLP has integers of 64 bits; lists and mappings become text."""
    if isinstance(value, float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
        return value
    return str(value)
