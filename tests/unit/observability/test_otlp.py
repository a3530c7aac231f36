"""A collector gets each span of a run once, in its lane and process, on one clock; one that refuses is named."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from asyncrl import cli
from asyncrl.observability import otlp


@pytest.fixture
def collector() -> Iterator[HTTPServer]:
    """Its `taken` are (resource attributes, span); `status`: of its replies."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            data = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            for part in ExportTraceServiceRequest.FromString(data).resource_spans:
                names = {each.key: each.value.string_value for each in part.resource.attributes}
                server.taken += [(names, span) for scope in part.scope_spans for span in scope.spans]
            self.send_response(server.status)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server: Any = HTTPServer(("127.0.0.1", 0), Collector)
    server.taken, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [
        {"t": 100.0, "process": "generator-0", "role": "generator", "host": "a"},
        {"t": 101.0, "clock": [1000.0, 0.1]},
        {"t": 102.0, "lane": "engine", "do": "compute"},
        {"t": 103.0, "lane": "engine", "do": "wait/tasks"},
        {
            "t": 104.0,
            "took": 1.5,
            "lane": "weights",
            "do": "fetch",
            "version": 7,
            "odd": 1 << 70,
        },
        {"t": 105.0, "lane": "engine", "do": None},
    ]
    (tmp_path / "trace").mkdir()
    lines = [msgspec.json.encode(row) for row in rows]
    (tmp_path / "trace" / "generator-0.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return tmp_path


def send(run: Path, server: HTTPServer) -> int:
    address = f"http://127.0.0.1:{server.server_port}/v1/traces"
    return cli.main(["trace", str(run), "--otlp", address])


def test_spans_lie_in_their_lanes_and_processes(
    run: Path, collector: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert send(run, collector) == 0
    assert capsys.readouterr().out.endswith(": 5 spans\n")
    found = {
        span.name: (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9)
        for _, span in collector.taken
    }
    assert found == {
        "compute": (1102.0, 1103.0),
        "wait/tasks": (1103.0, 1105.0),
        "fetch": (1102.5, 1104.0),
        "engine": (1102.0, 1105.0),
        "weights": (1102.5, 1104.0),
    }
    spans = {span.name: span for _, span in collector.taken}
    assert spans["compute"].parent_span_id == spans["wait/tasks"].parent_span_id == spans["engine"].span_id
    assert spans["fetch"].parent_span_id == spans["weights"].span_id
    assert len({span.trace_id for span in spans.values()}) == 1
    assert len({span.span_id for span in spans.values()}) == 5
    about = {each.key: each.value for each in spans["fetch"].attributes}
    assert about["version"].int_value == 7
    assert about["odd"].string_value == str(1 << 70)
    names, _ = collector.taken[0]
    assert (names["service.name"], names["service.instance.id"]) == ("asyncrl-generator", "generator-0")
    assert (names["service.namespace"], names["host.name"]) == (run.name, "a")


def test_spans_that_are_sent_again_are_the_same(
    run: Path, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "BATCH", 2)
    assert (send(run, collector), send(run, collector)) == (0, 0)
    ids = [(span.trace_id, span.span_id) for _, span in collector.taken]
    assert len(ids) == 10
    assert ids[:5] == ids[5:]


def test_a_collector_that_refuses_is_named(
    run: Path, collector: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.status = 400
    assert send(run, collector) == 2
    error = capsys.readouterr().err
    assert f"otlp = 'http://127.0.0.1:{collector.server_port}/v1/traces'" in error
    assert "took 0 spans" in error
