"""Every preset of `configs/algorithms` learns the echo task, whose optimum is known, off-policy and with its models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from asyncrl.bench.climb import climb, presets

SHARE_OF_OPTIMUM = 0.7

STAND_FOR_ALL = ("distill", "gspo", "grpo", "rloo", "sapo")
"""They climb in `make test`; the others do in `make test-all`, and train some versions here."""


@pytest.mark.parametrize("preset", sorted(set(presets()) - set(STAND_FOR_ALL)))
def test_a_preset_trains(preset: str, tmp_path: Path) -> None:
    made = climb(preset, tmp_path, ["run.versions=3", "critic.warmup_versions=1"])
    assert len(made.rewards) == 3
    assert 0 < made.end < 0.3  # from random weights, with steps that moved them by something finite


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=pytest.mark.slow if preset not in STAND_FOR_ALL else ())
        for preset in presets()
    ],
)
def test_preset_climbs(preset: str, tmp_path: Path) -> None:
    made = climb(preset, tmp_path, enough=math.inf if preset == "safe_rlhf" else SHARE_OF_OPTIMUM)
    assert made.start < 0.2
    assert made.end >= SHARE_OF_OPTIMUM * made.best
    if preset == "safe_rlhf":
        assert (
            max(made.parts["cost"][-10:]) <= 0.05
        )  # the limit is 0.03, and the best policy without it would cost 0.1
