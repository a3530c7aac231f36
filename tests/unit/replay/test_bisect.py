"""The first difference between two records, cause before effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decided_groups import group

from asyncrl.errors import ConfigError
from asyncrl.learner.reporting.saved_groups import folder_of, save_groups
from asyncrl.replay.bisect import Divergence, bisect
from asyncrl.telemetry.decisions import FORMAT, ClaimedGroup, DecisionLog, TrainedVersion

STEPS = [
    TrainedVersion(
        version, False, 0xA0 + version, 0.5, [[ClaimedGroup(version, 7), ClaimedGroup(version + 1, 8)]]
    )
    for version in (1, 2, 3)
]


def recorded(run: Path, steps: list[TrainedVersion], begun: tuple[Any, ...] = (0, 0, 0xA0)) -> Path:
    log = DecisionLog(
        run / "decisions", "learner", {"format": FORMAT, "role": "learner", "config": "config.yaml"}
    )
    log.note("begun", *begun)
    for step in steps:
        log.note(*step.to_wire())
    log.close()
    return run


def found(folder: Path, steps: list[TrainedVersion], **other: Any) -> Divergence | None:
    return bisect(recorded(folder / "one", STEPS), recorded(folder / "two", steps, **other))


def changed(at: int, **values: Any) -> list[TrainedVersion]:
    return [replace(step, **values) if number == at else step for number, step in enumerate(STEPS)]


def test_equal_records_have_no_difference(tmp_path: Path) -> None:
    assert found(tmp_path, STEPS) is None


def test_first_weights(tmp_path: Path) -> None:
    divergence = found(tmp_path, STEPS, begun=(0, 0, 0xBB))
    assert divergence == Divergence("start", 0, "the weights of version 0, with which both begin, differ")


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ({"version": 9}, "decision", "/one trains version 2; .*/two trains version 9"),
        (
            {"claims": [[ClaimedGroup(2, 7), ClaimedGroup(4, 8)]]},
            "decision",
            "on task 3 in .*/one, on task 4 in .*/two",
        ),
        (
            {"claims": [[ClaimedGroup(2, 7)]]},
            "decision",
            "on task 3 in .*/one, on no further group in .*/two",
        ),
        (
            {"claims": [[ClaimedGroup(2, 9), ClaimedGroup(3, 8)]], "norm": 0.75, "weights": 1},
            "groups",
            "the groups of task 2 differ: tokens, log-probs",
        ),
        ({"norm": 0.75, "weights": 1}, "gradient", r"has the norm 0\.5 in .*/one, 0\.75 in .*/two"),
        ({"weights": 1}, "weights", "version 2, after gradients of equal norm, has other weights"),
    ],
)
def test_the_cause_comes_before_its_effects(
    tmp_path: Path, values: dict[str, Any], kind: str, text: str
) -> None:
    later = replace(STEPS[2], norm=0.125, weights=5)
    divergence = found(tmp_path, [*changed(1, **values)[:2], later])
    assert divergence is not None
    assert (divergence.kind, divergence.after) == (kind, 1)
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(divergence.text)


def test_how_claims_are_cut_is_no_difference_of_groups(tmp_path: Path) -> None:
    assert found(tmp_path, changed(1, claims=[[ClaimedGroup(2, 7)], [ClaimedGroup(3, 8)]])) is None


def test_one_run_is_longer(tmp_path: Path) -> None:
    divergence = found(tmp_path, STEPS[:2])
    assert divergence is not None
    assert divergence.text == f"{tmp_path}/one trains version 3; the other run has ended"


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (group(logprob=-0.125), "logprobs of rollout 0, token 1: -0.25 and -0.125"),
        (group(version=1), "versions of rollout 0, token 1: 2 and 1"),
        (group(reward=0.25), "the reward of rollout 0: 0.5 and 0.25"),
    ],
)
def test_the_token_is_named_where_groups_are_saved(tmp_path: Path, other: Any, text: str) -> None:
    divergence = None
    for run, saved in (("one", group()), ("two", other)):
        save_groups(folder_of(tmp_path / run, 2), [saved])
    divergence = found(tmp_path, changed(1, claims=[[ClaimedGroup(2, 7), ClaimedGroup(3, 9)]]))
    assert divergence is not None
    assert divergence.text == f"for version 2 the groups of task 3 differ: {text}"


def test_a_run_without_decisions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no decisions in"):
        bisect(recorded(tmp_path / "one", STEPS), tmp_path)
