"""Every preset of `configs/algorithms` learns the echo task, whose optimum is known, off-policy and with its models."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.bench.climb import climb, presets

SHARE_OF_OPTIMUM = 0.7


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets())
def test_preset_climbs(preset: str, tmp_path: Path) -> None:
    made = climb(preset, tmp_path)
    assert made.start < 0.2
    assert made.end >= SHARE_OF_OPTIMUM * made.best
    if preset == "safe_rlhf":
        assert (
            max(made.parts["cost"][-10:]) <= 0.05
        )  # the limit is 0.03, and the best policy without it would cost 0.1
