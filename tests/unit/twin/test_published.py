"""Published comparisons of asynchronous with synchronous training: right sign and size, or named as not coming out.

Sources, inputs and assumptions of each case are in published.yaml beside this file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.yaml_values import parse_yaml
from asyncrl.twin.outcome import Setup, Simulated
from asyncrl.twin.simulate import simulate
from asyncrl.twin.times import SECTIONS, times_of

CASES: dict[str, dict[str, Any]] = parse_yaml((Path(__file__).parent / "published.yaml").read_text("utf-8"))
PAGE = Path(__file__).parents[3] / "docs" / "twin.md"


@cache
def known(name: str, way: str) -> Simulated:
    return outcome(CASES[name], way)


def outcome(case: dict[str, Any], way: str) -> Simulated:
    found = {**case["shared"], **case[way]}
    sizes = {name: found[name] for name in ("groups", "group_size", "whole_batch")}
    times = times_of({name: found[name] for name in SECTIONS if name in found})
    return simulate(Setup(**sizes, **found["setup"]), times, versions=6)


def ratio(name: str) -> float:
    return known(name, "synchronous").version_s / known(name, "asynchronous").version_s


@pytest.mark.parametrize("name", CASES)
def test_a_published_case(name: str) -> None:
    case = CASES[name]
    lowest, highest = case["published"]
    found, slack = ratio(name), case["within"]
    near = lowest * (1 - slack) <= found <= highest * (1 + slack)
    assert near is case.get("comes_out", True), f"{found:.2f}"
    assert (found > 1.0) is (highest > 1.0) or near, "the sign"
    shown = f"{lowest:g}" if lowest == highest else f"{lowest:g} to {highest:g}"
    assert f"| `{name}` | {shown} | {found:.2f} |" in PAGE.read_text("utf-8")


def test_the_synchronous_steps_are_those_of_the_sources() -> None:
    for name, seconds in {
        "verl-one-step-16": 749.0,
        "verl-fully-async-32": 790.1,
        "verl-fully-async-128": 356.3,
        "vime-qwen3-4b": 178.3,
        "areal-1.5b-128": 147.6,
        "llamarl-405b": 635.8,
    }.items():
        assert known(name, "synchronous").version_s == pytest.approx(seconds, rel=0.05), name


def test_generators_do_not_pay_where_the_learner_is_the_bottleneck() -> None:
    """verl's page on fully asynchronous training: an idle rollouter beside a busy trainer calls for trainer devices."""
    case = CASES["verl-one-step-16"]
    more = {"generators": 8, "slots": 1024, "max_staleness": 1}
    wider = {**case, "asynchronous": {**case["asynchronous"], "setup": more}}
    before, after = known("verl-one-step-16", "asynchronous"), outcome(wider, "asynchronous")
    assert after.groups_per_s == pytest.approx(before.groups_per_s, rel=0.01)
    assert after.busy("generators") < before.busy("generators")
