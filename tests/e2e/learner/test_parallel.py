"""Runs whose learner is two processes with the same groups: one data rank, of which one process speaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from own_functions import reward_key
from processes import counts_of, final_weights, rows, summary_of
from synchronous_runs import synchronous_runs

WAYS = {
    "tensor": ["learner.parallel.tensor=2"],
    "pipeline": ["learner.parallel.pipeline=2", "learner.micro_batch_tokens=64"],
}
"""Two processes that share each matrix, or that each have some of the layers."""


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_two_processes_is_the_run_of_one(config_file: Path, way: str) -> None:
    """Every version is waited for; engines compare what they say with the learner whose shards they hold together."""
    shared = ["run.versions=2", reward_key("half_flat")]
    runs = synchronous_runs(config_file, shared, one=[], two=["learner.processes=2", *WAYS[way]])
    norms = []
    for run in runs:
        assert (*counts_of(run), summary_of(run)["rollouts_trained"]) == (2, 8, 0, 32)
        told = rows(run)
        assert all(row["train/groups"] == 4 and row["train/logprob_gap/train/max"] < 1e-4 for row in told)
        norms.append([row["train/grad_norm"] for row in told])
    one, two = map(final_weights, runs)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert min(norms[0]) > 0
    assert one.keys() == two.keys()
    for parameter, tensor in one.items():
        torch.testing.assert_close(two[parameter], tensor, atol=1e-4, rtol=0)
