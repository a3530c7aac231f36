"""Groups without spread end as DROPPED(filtered), and other tasks take their place."""

from __future__ import annotations

from pathlib import Path

from own_functions import reward_key
from processes import rows

from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train


def test_a_run_trains_full_batches_of_groups_with_spread(config_file: Path) -> None:
    overrides = ["algorithm.filter=no_spread", reward_key("half_flat")]
    summary = train(load_config(config_file, overrides))
    assert (summary["versions"], summary["groups_trained"], summary["rollouts_trained"]) == (4, 16, 64)
    assert summary["staleness"]["max"] <= 2
    assert summary["heldout_accuracy_end"] is not None  # of half_flat: an evaluation is never filtered
    last = rows(config_file.parent / "it")[-1]
    # The task before the last one of each trained pair was flat, so about as many are dropped as are trained.
    assert last["queue/dropped"] == last["queue/dropped/filtered"] >= 10
