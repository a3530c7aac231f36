"""The endpoint of one process for Prometheus: figures that it reports anyway, read when they are requested.

    ProcessStatus.figures ──▸ FigureCollector ──▸ prometheus_client's registry ──▸ http://HOST:PORT/metrics
    vLLM's own metrics ────────────────────────────────────▴    RUN/prometheus/<process>.json: the target, for file_sd

It begins once the process has loaded. An endpoint that cannot listen is a warning.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config.schema import TelemetryConfig
from asyncrl.launch.views.process_reports import beside
from asyncrl.system.disk import replace_text
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import TRAIN

log = logging.getLogger(__name__)

FOLDER = "prometheus"
PORTS = 100
"""From `telemetry.prometheus_port` on, of which each process of a machine takes the first free one."""

LABELS = {
    "seconds": "span",
    "time": "span",
    "wait_fraction": "whom",
    "dropped": "reason",
    "dropped_by_reason": "reason",
    "refused": "reason",
    "groups": "stream",
    "late": "function",
    "under_way": "function",
    "part": "part",
    "silent_s": "client",
}
"""Parts of a figure's name ▸ the label that has the rest of it as its value."""

COUNTERS = re.compile(
    r"(generator|pool)/(tokens|seconds|busy_s|preemptions|drafted|accepted|groups|dropped|refused|returned|lost|late|reward/|agent/"
    r"|weights/(flips|failures|lost|bytes))"
)
"""Figures that are totals of a process; all others are of now."""


def endpoint(
    config: TelemetryConfig, run_folder: Path, process: str, role: str, status: ProcessStatus
) -> AbstractContextManager[None]:
    """Inside, this process has its endpoint, if `telemetry.prometheus_port` is set."""
    if config.prometheus_port is None:
        return nullcontext()
    about = {"run": run_folder.name, "process": process, "role": role}
    work = partial(_serve, config.prometheus_host, config.prometheus_port, run_folder, about, status)
    return beside(work, status, "prometheus")


def _serve(
    host: str,
    port: int,
    folder: Path,
    about: Mapping[str, str],
    status: ProcessStatus,
    ended: threading.Event,
) -> None:
    status.loaded.wait()
    if ended.is_set():
        return
    target, collector = folder / FOLDER / f"{about['process']}.json", FigureCollector(status, about)
    try:
        from prometheus_client import REGISTRY

        server, thread = _listening(host, port)
        REGISTRY.register(collector)
        reached = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        target.parent.mkdir(exist_ok=True)
        replace_text(target, json.dumps([{"targets": [f"{reached}:{server.server_port}"], "labels": about}]))
    except (OSError, ImportError, ValueError) as error:
        log.warning("this process has no endpoint for Prometheus: %s", error)
        return
    ended.wait()
    with suppress(OSError):
        target.unlink(missing_ok=True)
    REGISTRY.unregister(collector)
    server.shutdown()
    server.server_close()
    thread.join()


def _listening(host: str, port: int) -> tuple[Any, threading.Thread]:
    """The first rank of a machine has the first port."""
    from prometheus_client import start_http_server

    first = port and port + int(os.environ.get("LOCAL_RANK", "0"))
    for number in range(first, port + PORTS if port else 1):
        try:
            return start_http_server(number, host)
        except OSError as error:
            taken = error
    raise taken


class FigureCollector:
    """Metrics of the figures that a status has at that moment. about: labels of the one that names the process"""

    def __init__(self, status: ProcessStatus, about: Mapping[str, str]) -> None:
        self._status, self._about = status, about

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("asyncrl_process", "of this endpoint", value=dict(self._about))
        families: dict[str, Any] = {}
        seen = set()
        for figure, value in figures_of(self._about["role"], self._status.figures):
            name, label, of = metric_of(figure)
            if (name, of) in seen:
                continue
            seen.add((name, of))
            kind = CounterMetricFamily if COUNTERS.match(figure) else GaugeMetricFamily
            if name not in families:
                families[name] = kind(
                    name, f"see {figure} in docs/metrics.md", labels=[label] if label else []
                )
            families[name].add_metric([of] if label else [], value)
        yield from families.values()


def figures_of(role: str, figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers by names as those of metrics.jsonl. A learner's figures are its last row, of which the queue itself has
    its part."""
    if role == "queue":
        train = {**figures.get("streams", {}).get(TRAIN, {})}
        queue = {name: figures.get(name, {}) for name in ("refused", "silent_s")}
        yield from _numbers({**train, **queue}, "queue/")
    elif role == "learner":
        yield from _numbers({name: n for name, n in figures.items() if not name.startswith("queue/")}, "")
    else:
        yield from _numbers(figures, "generator/" if role == "generator" else "pool/")


def metric_of(figure: str) -> tuple[str, str, str]:
    """(the metric's name, its label, the label's value) of a figure; without a label both are empty.

    >>> metric_of("generator/seconds/wait/tasks"), metric_of("train/age/2-3/log_ratio")
    (('asyncrl_generator_seconds', 'span', 'wait/tasks'), ('asyncrl_train_age_2_3_log_ratio', '', ''))
    """
    parts, label, rest = figure.split("/"), "", ""
    for index, part in enumerate(parts[:-1], 1):
        if part in LABELS:
            parts, label, rest = parts[:index], LABELS[part], "/".join(parts[index:])
            break
    return re.sub(r"\W", "_", f"asyncrl_{'_'.join(parts)}", flags=re.ASCII), label, rest


def _numbers(figures: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not abs(value) > sys.float_info.max:
            yield f"{prefix}{name}".encode(errors="replace").decode(), float(value)
