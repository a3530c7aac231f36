"""Weights over a network of hosts: the tables, and the benches themselves with a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hosts import network_or_skip
from processes import ran

from bench.network.__main__ import OTHERS, OURS, table
from bench.network.changes import FORMS
from bench.network.changes import table as changes_table


def test_each_way_has_a_row_with_its_share_of_a_card() -> None:
    found = dict.fromkeys((*OTHERS, *OURS), 0.1) | {"gloo_raw / limit": 0.8}
    lines = table({1.0: found}, 100, 5, 64.0).splitlines()
    assert "| one gloo send of 256 MB | 0.100 (0.80) |" in lines
    assert sum("0.100" in line for line in lines) == len(OTHERS) + len(OURS)


@pytest.mark.slow
def test_a_small_model_arrives_at_all_hosts_in_every_way(tmp_path: Path) -> None:
    with network_or_skip(1, tmp_path):
        pass
    shape = ("--parameters", "1", "--repetitions", "1", "--gbit", "10")
    ran("bench.network", *shape, "--json", str(tmp_path / "found.json"), executed=True, deadline_s=300.0)
    found = json.loads((tmp_path / "found.json").read_text())["by_gbit_per_s"]["10.0"]
    assert {*OTHERS, *OURS} <= {*found}
    assert all(found[name] > 0 for name in (*OTHERS, *OURS))


def test_each_link_has_a_table_of_forms() -> None:
    found = {f"seconds.{form}": 2.0 for form in FORMS} | {f"limit.{form}": 1.5 for form in FORMS}
    found |= {f"bytes.{form}": 0.019 for form in FORMS}
    lines = changes_table({100.0: found, 1000.0: found}, 100, 5).splitlines()
    assert lines.count("| deflated | 0.0190 | 2.00 (1.50) |") == 2
    assert lines.count("| bytes.deflated ≤ 0.02 | pass: 0.019 |") == 2


@pytest.mark.slow
def test_a_small_model_follows_over_a_slow_link_in_every_form(tmp_path: Path) -> None:
    with network_or_skip(1, tmp_path):
        pass
    shape = ("--parameters", "1", "--repetitions", "1", "--mbit", "20")
    place = tmp_path / "found.json"
    ran("bench.network.changes", *shape, "--json", str(place), executed=True, deadline_s=300.0)
    found = json.loads(place.read_text())["by_mbit_per_s"]["20.0"]
    assert found["bytes.whole"] == 1
    assert 0 < found["bytes.deflated"] < 0.9 * found["bytes.changes"] < 0.1
