"""The endpoint for Prometheus: the figures of a process as metrics that Prometheus' own parser reads."""

from __future__ import annotations

import json
import logging
import socket
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from processes import free_port, until
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.config.schema import TelemetryConfig
from asyncrl.launch.views import prometheus
from asyncrl.launch.views.prometheus import endpoint
from asyncrl.telemetry.status import ProcessStatus

GENERATOR = {
    "tokens": 12,
    "held": 3,
    "kv_usage": 0.5,
    "seconds": {"compute": 2.0, "wait/tasks": 1.5},
    "dropped/filtered": 2,
    "weights/flips": 4,
    "weights/pauses_ms": [1.0],
    "a.b": 1,
    "a/b": 2,
}
QUEUE = {
    "streams": {
        "train": {"ready": 5, "draining": False, "dropped_by_reason": {"filtered": 1}, "settings": None}
    },
    "refused": {"full": 2},
    "silent_s": {"generator-0": 0.5},
    "workers": {"generator-0": {"tokens": 9}},
}
LEARNER = {
    "version": 7,
    "train/loss": 0.5,
    "perf/time/wait/groups": 2.5,
    "queue/ready": 5,
    "note": "no number",
}


def scraped(address: str) -> dict[tuple[str, str], float]:
    """(sample, its labels) ▸ value, of our metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {
        (
            sample.name.removeprefix("asyncrl_"),
            ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())),
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("asyncrl_")
    }


def served(folder: Path, role: str, figures: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    status = ProcessStatus()
    status.figures = figures
    status.loaded.set()
    target = folder / "prometheus" / "p.json"
    with endpoint(TelemetryConfig(prometheus_port=0), folder, "p", role, status):
        until(target.exists, "the target")
        ((group,), address) = (read := json.loads(target.read_text())), read[0]["targets"][0]
        assert group["labels"] == {"run": folder.name, "process": "p", "role": role}
        found = scraped(address)
    assert not target.exists()
    assert found.pop(("process_info", f"process=p,role={role},run={folder.name}")) == 1
    return found


def test_a_generator_has_counters_and_gauges(tmp_path: Path) -> None:
    assert served(tmp_path, "generator", GENERATOR) == {
        ("generator_tokens_total", ""): 12,
        ("generator_held", ""): 3,
        ("generator_kv_usage", ""): 0.5,
        ("generator_seconds_total", "span=compute"): 2.0,
        ("generator_seconds_total", "span=wait/tasks"): 1.5,
        ("generator_dropped_total", "reason=filtered"): 2,
        ("generator_weights_flips_total", ""): 4,
        ("generator_a_b", ""): 1,  # the second of a name is left out
    }


def test_a_queue_has_the_counts_of_training(tmp_path: Path) -> None:
    assert served(tmp_path, "queue", QUEUE) == {
        ("queue_ready", ""): 5,
        ("queue_draining", ""): 0,
        ("queue_dropped_by_reason", "reason=filtered"): 1,
        ("queue_refused", "reason=full"): 2,
        ("queue_silent_s", "client=generator-0"): 0.5,
    }


def test_a_learner_has_its_last_row_without_the_part_of_the_queue(tmp_path: Path) -> None:
    assert served(tmp_path, "learner", LEARNER) == {
        ("version", ""): 7,
        ("train_loss", ""): 0.5,
        ("perf_time", "span=wait/groups"): 2.5,
    }
    assert served(tmp_path, "learner", {}) == {}


def test_a_taken_port_leads_to_the_next_and_none_to_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status = ProcessStatus()
    status.loaded.set()
    port, target = free_port(), tmp_path / "prometheus" / "p.json"
    config = TelemetryConfig(prometheus_port=port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with endpoint(config, tmp_path, "p", "learner", status):
            until(target.exists, "the target")
            ((group,),) = (json.loads(target.read_text()),)
            assert int(group["targets"][0].rpartition(":")[2]) > port
        monkeypatch.setattr(prometheus, "PORTS", 1)
        with caplog.at_level(logging.WARNING), endpoint(config, tmp_path, "p", "learner", status):
            until(lambda: caplog.records, "the warning")
    assert "this process has no endpoint for Prometheus" in caplog.text
    assert not target.exists()


def test_the_first_rank_of_a_machine_has_the_first_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late it comes: a pod is scraped at that one."""
    status = ProcessStatus()
    status.loaded.set()
    port, target = free_port(), tmp_path / "prometheus" / "p.json"
    monkeypatch.setenv("LOCAL_RANK", "1")
    with endpoint(TelemetryConfig(prometheus_port=port), tmp_path, "p", "learner", status):
        until(target.exists, "the target")
        ((group,),) = (json.loads(target.read_text()),)
    assert int(group["targets"][0].rpartition(":")[2]) > port


def test_nothing_is_served_unless_a_port_is_set(tmp_path: Path) -> None:
    with endpoint(TelemetryConfig(), tmp_path, "p", "learner", ProcessStatus()):
        assert not (tmp_path / "prometheus").exists()


def test_a_process_that_ends_while_it_loads_has_no_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeverLoaded(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            ended.set()
            return True

    status, ended = ProcessStatus(), threading.Event()
    status.loaded = NeverLoaded()
    monkeypatch.setattr(prometheus, "_listening", lambda *_: pytest.fail("it listens"))
    prometheus._serve("127.0.0.1", 0, tmp_path, {"process": "p"}, status, ended)
    assert not (tmp_path / "prometheus").exists()


@pytest.mark.parametrize(("host", "named"), [("0.0.0.0", socket.gethostname()), ("127.0.0.1", "127.0.0.1")])
def test_the_target_of_all_addresses_is_the_name_of_the_machine(
    tmp_path: Path, host: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, listening = ProcessStatus(), prometheus._listening
    status.loaded.set()
    monkeypatch.setattr(prometheus, "_listening", lambda _, port: listening("127.0.0.1", port))
    target = tmp_path / "prometheus" / "p.json"
    with endpoint(TelemetryConfig(prometheus_port=0, prometheus_host=host), tmp_path, "p", "learner", status):
        until(target.exists, "the target")
        ((group,),) = (json.loads(target.read_text()),)
        assert group["targets"][0].rpartition(":")[0] == named


def test_a_figure_that_cannot_be_served_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    found = served(tmp_path, "generator", {"tokens": 12, "huge": 10**400, "seconds": {'\ud800"} x{y="': 2.0}})
    assert found == {("generator_tokens_total", ""): 12, ("generator_seconds_total", 'span=?"} x{y="'): 2.0}
