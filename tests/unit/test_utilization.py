"""The report of `asyncrl bench utilization`, on rows made up by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.bench.modes import modes
from asyncrl.bench.plot import draw
from asyncrl.bench.utilization import summarise
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config, GeneratorConfig, LearnerConfig, QueueConfig


def step(
    version: int, seconds: float, generate: float, learn: float, staleness: float = 0.0
) -> dict[str, Any]:
    """A version of 10 rollouts of 5 tokens, whose reward is a tenth of its number."""
    return {
        "version": version,
        "step_s": seconds,
        "rollouts": 10,
        "tokens": 50,
        "reward/mean": version / 10,
        "staleness/mean": staleness,
        "staleness/max": staleness,
        "time/compute/forward_backward": learn,
        "time/wait/groups": seconds - learn,
        "generator/time/compute": generate,
        "generator/time/wait/tasks": seconds - generate,
    }


ROWS = {
    "sync_split": [step(v, 5.0, generate=2.0, learn=3.0) for v in range(1, 11)],
    "sync_colocated": [step(v, 4.0, generate=1.5, learn=2.5) for v in range(1, 11)],
    "one_step": [step(v, 3.5, generate=2.0, learn=3.0, staleness=1.0) for v in range(1, 11)],
    "async": [step(v, 3.125, generate=2.0, learn=3.0, staleness=2.0) for v in range(1, 11)],
}


def test_rates_shares_and_bounds() -> None:
    figures = summarise(ROWS, modes(Config()), reward=None)["figures"]
    assert figures["rollouts_per_s.sync_split"] == pytest.approx(2.0)
    assert figures["rollouts_per_s.async"] == pytest.approx(3.2)
    assert figures["bound_rollouts_per_s.sync_split"] == pytest.approx(10 / 5)
    assert figures["bound_rollouts_per_s.sync_colocated"] == pytest.approx(10 / 4)
    assert figures["bound_rollouts_per_s.async"] == pytest.approx(10 / 3)
    assert figures["busy.generator.async"] == pytest.approx(2 / 3.125)
    assert figures["busy.learner.sync_split"] == pytest.approx(0.6)
    assert figures["async_over_sync_split"] == pytest.approx(1.6)
    assert figures["async_over_sync_colocated"] == pytest.approx(3.2 / 2.5)
    assert figures["staleness_max.async"] == 2.0


def test_time_to_a_reward_is_that_of_its_mean_over_five_versions() -> None:
    """Versions 3 to 7 have a mean of 0.5, after 7 steps; 1.0 is never reached."""
    figures = summarise(ROWS, modes(Config()), reward=0.5)["figures"]
    assert figures["s_to_reward.sync_split"] == pytest.approx(35.0)
    assert summarise(ROWS, modes(Config()), reward=1.0)["figures"]["s_to_reward.async"] is None
    reached_by_all = summarise(ROWS, modes(Config()), reward=None)["figures"]
    assert reached_by_all["reward_target"] == pytest.approx(0.8)


def test_every_mode_is_a_valid_config() -> None:
    demo = Path(__file__).parents[2] / "configs" / "recipes" / "demo.yaml"
    for mode in modes(load_config(demo)):
        assert load_config(demo, mode.overrides).queue.max_staleness in (0, 1, 2)


def test_colocated_pools_share_all_devices() -> None:
    config = Config(
        generator=GeneratorConfig(devices="0,1"),
        learner=LearnerConfig(devices="1,2,3"),
        queue=QueueConfig(max_staleness=5),
    )
    split, colocated, _, free = modes(config)
    assert "generator.devices='0,1,2,3'" in colocated.overrides
    assert "learner.processes=4" in colocated.overrides
    assert "queue.max_staleness=5" in free.overrides
    assert "queue.max_staleness=0" in split.overrides


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(summarise(ROWS, modes(Config()), reward=None), tmp_path / "modes.svg")
    picture = (tmp_path / "modes.svg").read_text()
    assert "<svg" in picture
