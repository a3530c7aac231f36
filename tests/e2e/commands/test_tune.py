"""`asyncrl tune` on real runs: keys that it measures, and a configuration with them that trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_functions import reward_key
from processes import ran

from asyncrl.config.load import load_config

pytestmark = pytest.mark.slow


def test_a_run_is_tuned_by_real_runs_and_the_written_file_trains(config_file: Path) -> None:
    folder, written = config_file.parent / "tune", config_file.parent / "tuned.yaml"
    words = ("--versions", "20", "--repetitions", "1", "--dir", str(folder), "--write", str(written))
    synchronous = ("queue.max_staleness=0", "generator.fixed_shape=false", reward_key("late"))
    printed = ran("asyncrl", "tune", str(config_file), *synchronous, *words, deadline_s=300)
    assert "queue.max_staleness=" in printed.splitlines()[-2], printed
    assert " × the throughput of the given keys in one repetition" in printed
    assert printed.splitlines()[-1] == f"written to {written}"
    config = load_config(str(written))
    assert config.queue.max_staleness > 0
    assert config.batch.groups == 4
