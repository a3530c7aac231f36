"""Whole runs in which weights change in the middle of samples, with `generator.kv` other than keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_functions import reward_key
from processes import ran, rows

pytestmark = pytest.mark.slow


def trained(config: Path, kv: str) -> list[dict[str, Any]]:
    """The rows of ten versions of long samples."""
    words = (
        f"generator.kv={kv}",
        reward_key("of_one_version"),
        "run.versions=10",
        "evaluation.source=null",
        "generator.slots=16",
        "generator.max_tokens=200",
        "generator.max_length=256",
        "learner.micro_batch_tokens=4096",
    )
    ran("asyncrl", "train", str(config), *words)
    told = rows(config.parent / "it")
    assert len(told) == 10
    return told


def test_with_recompute_the_learner_agrees_with_what_a_version_says_in_the_middle_of_samples(
    config_file: Path,
) -> None:
    told = trained(config_file, "recompute")
    mixed = [row for row in told if row["rollout/reward/part/one_version"] < 1]
    assert sum(row["train/logprob_gap/train/tokens"] for row in mixed) > 0
    assert max(row.get("train/logprob_gap/train/max", 0.0) for row in told) < 1e-4


def test_with_drain_every_sample_is_of_one_version(config_file: Path) -> None:
    assert {row["rollout/reward/part/one_version"] for row in trained(config_file, "drain")} == {1.0}
