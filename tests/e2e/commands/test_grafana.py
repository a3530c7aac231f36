"""A whole run at Prometheus: each process is a target, and the dashboard names no metric that none of them serves."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from processes import FOR_EVER, started, until, until_trained
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[3] / "configs" / "grafana" / "asyncrl.json"
METRIC = re.compile(r"\b(?:asyncrl|process)_\w+")


def served(run: Path) -> dict[str, set[str]]:
    """Process ▸ the names of its samples."""
    found = {}
    for file in (run / "prometheus").glob("*.json"):
        (group,) = json.loads(file.read_text())
        with urllib.request.urlopen(f"http://{group['targets'][0]}/metrics", timeout=30) as reply:
            families = text_string_to_metric_families(reply.read().decode())
            found[group["labels"]["process"]] = {one.name for each in families for one in each.samples}
    return found


@pytest.mark.slow
def test_each_process_is_a_target_and_the_dashboard_has_no_metric_that_none_serves(config_file: Path) -> None:
    run, board = config_file.parent / "it", json.loads(DASHBOARD.read_text(encoding="utf-8"))
    words = ("telemetry.prometheus_port=0", FOR_EVER, "checkpoint.every=1000")
    with started("asyncrl", "train", str(config_file), *words) as launcher:
        until_trained(run, 3, launcher)
        names = served(run)
        assert names.keys() == {"queue", "learner", "generator-0"}
        every = set().union(*names.values())
        expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
        expressions += [each["query"] for each in board["templating"]["list"]]
        wanted = {name for expression in expressions for name in METRIC.findall(expression)}
        assert len(wanted) > 15
        until(
            lambda: wanted <= (every | set().union(*served(run).values())),
            f"one of {sorted(wanted - every)}",
            launcher,
        )
