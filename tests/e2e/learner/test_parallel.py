"""Runs whose learner is two processes with the same groups: one data rank, of which one process speaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import final_weights, rows

from asyncrl.config.load import load_config
from asyncrl.launch.local import train

OWN = Path(__file__).parents[1].joinpath("own_functions.py")


WAYS = {
    "tensor": ["learner.parallel.tensor=2"],
    "pipeline": ["learner.parallel.pipeline=2", "learner.micro_batch_tokens=64"],
}
"""Two processes that share each matrix, or that each have some of the layers."""


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_two_processes_is_the_run_of_one(config_file: Path, way: str) -> None:
    """Every version is waited for; engines compare what they say with the learner whose shards they hold together."""
    overrides = [
        "run.versions=2",
        "queue.max_staleness=0",
        "evaluation.source=null",
        f"reward.function='{OWN}:half_flat'",
    ]
    finals, norms = [], []
    for name, more in (("one", []), ("two", ["learner.processes=2", *WAYS[way]])):
        summary = train(load_config(config_file, [*overrides, f"run.name={name}", *more]))
        assert (summary["versions"], summary["groups_trained"], summary["rollouts_trained"]) == (2, 8, 32)
        told = rows(config_file.parent / name)
        assert all(row["groups"] == 4 and row["logprob_gap/train/max"] < 1e-4 for row in told)
        norms.append([row["grad_norm"] for row in told])
        finals.append(final_weights(config_file.parent / name))
    one, two = finals
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert min(norms[0]) > 0
    assert one.keys() == two.keys()
    for parameter, tensor in one.items():
        torch.testing.assert_close(two[parameter], tensor, atol=1e-4, rtol=0)
