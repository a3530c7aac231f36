"""The bench of the gateway, once with a model of no size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.agents.__main__ import BARS, main
from bench.agents.recipes import BARS as RECIPES
from bench.bars import value_of


@pytest.mark.slow
def test_every_figure_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--recipes", "--rounds", "1", "--at-once", "4", "--rollouts", "8", "--crowd", "4"]
    monkeypatch.setattr(sys, "argv", ["bench", "--tiny", *sizes, "--json", str(tmp_path / "figures.json")])
    main()
    found = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert [bar.figure for bar in BARS if value_of(bar, found) is None] == [bar.figure for bar in RECIPES]
    assert found["adapter_bytes_share / adapter_parameter_share"] <= 1.01
    assert (found["unequal_logprobs"], found["recorded_logprobs"] > 0) == (0, True)
    assert found["single_gateway"] > 0
    assert found["crowd_s"] > 0
