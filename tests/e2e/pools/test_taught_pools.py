"""Models that learn on pools of their own, in the processes of a run: what they learn, and what dies with whom."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_cases import OWN_CRITIC
from own_functions import LENGTH
from processes import (
    child,
    counts_of,
    final_weights,
    kill_after,
    ran,
    rows,
    started,
    succeeded,
    summary_of,
    until_trained,
    versions,
)
from synchronous_runs import SYNCHRONOUS, synchronous_runs

from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train
from asyncrl.learner import checkpoint

pytestmark = pytest.mark.slow

PPO = [
    "algorithm.advantage=gae",
    LENGTH,
    "evaluation.source=null",
    "critic.optimizer.lr=1e-3",
    "placement.critic.where=pool",
]
FIRST_AND_LATER = (1, 12)
"""Versions before the first checkpoint, and after some."""


def assert_same_weights(run: Path, other: Path) -> None:
    mine, theirs = final_weights(run), final_weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def test_two_synchronous_runs_with_a_critic_on_a_pool_have_the_same_weights(config_file: Path) -> None:
    several = [
        "run.versions=3",
        "learner.processes=2",
        "learner.mini_batches=2",
        "critic.warmup_versions=1",
    ]
    one, two = synchronous_runs(config_file, [*PPO, *several], one=[], two=[])
    assert_same_weights(one, two)
    first, _, last = rows(one)
    assert {"train/critic/loss", "train/critic/grad_norm", "train/critic/explained_variance"} <= first.keys()
    assert ("train/loss" in first, "train/loss" in last) == (False, True)
    assert last["rollout/pool/critic/steps"] > 0
    newest = checkpoint.to_resume(one)
    assert newest is not None
    assert {path.name for path in newest[0].iterdir()} == {"critic", "learner", "meta.msgpack"}


def test_a_killed_critic_takes_the_learner_back_with_it_and_nothing_is_lost(config_file: Path) -> None:
    run = config_file.parent / "it"
    words = [*PPO, "run.versions=30", "checkpoint.every=2", "queue.lease_s=2"]
    with started("asyncrl", "train", str(config_file), *words) as launcher:
        kill_after(run, FIRST_AND_LATER, launcher, "asyncrl", "pool", "critic")
        printed = succeeded(launcher)
    assert "critic-0 ended (killed by SIGKILL) and is started again, 2 of 3 restarts" in printed
    assert "learner ended (exit code 11) and is started again from the newest checkpoint, 2 of 3" in printed
    assert "has lost the pool of the critic" in (run / "logs" / "learner.log").read_text()
    assert versions(run) == list(range(1, 31))
    assert counts_of(run) == (30, 120, 0)
    assert summary_of(run)["staleness"]["max"] <= 2


def test_a_killed_learner_finds_the_critic_of_its_checkpoint_again(config_file: Path) -> None:
    """The same pool goes on, and the run ends with the weights of one that nobody disturbed."""
    here = config_file.parent
    words = [*PPO, *SYNCHRONOUS, "run.versions=24", "checkpoint.every=2"]
    words += ["generator.threads=1", "learner.threads=1", "placement.critic.threads=1"]
    ran("asyncrl", "train", str(config_file), *words, "run.name=calm")
    run = here / "killed"
    with started("asyncrl", "train", str(config_file), *words, "run.name=killed") as launcher:
        pool = child(launcher, "asyncrl", "pool", "critic").pid
        kill_after(run, FIRST_AND_LATER, launcher, "asyncrl", "learner")
        until_trained(run, 13, launcher)
        assert child(launcher, "asyncrl", "pool", "critic").pid == pool
        succeeded(launcher)
    assert versions(run) == list(range(1, 25))
    assert_same_weights(run, here / "calm")


def test_a_second_critic_of_a_users_file_learns_on_a_pool_of_its_own(config_file: Path) -> None:
    """Beside the first one, which is with the learner; the run goes on from its checkpoint."""
    words = [f"algorithm.own_advantage={OWN_CRITIC}:two_horizons", *PPO[1:4]]
    words += ["placement.own={near: {where: pool}}", "run.versions=4", "checkpoint.every=2"]
    ran("asyncrl", "train", str(config_file), *words)
    run = config_file.parent / "it"
    ran("asyncrl", "train", str(config_file), *words, "run.versions=6", "run.resume=true")
    assert versions(run) == list(range(1, 7))
    last = rows(run)[-1]
    assert {"train/critic/loss", "train/near/loss", "train/near/explained_variance"} <= last.keys()
    newest = checkpoint.to_resume(run)
    assert newest is not None
    assert {path.name for path in newest[0].iterdir()} == {"near", "learner", "meta.msgpack"}


def test_the_reward_model_of_prime_learns_on_two_ranks_of_a_pool(config_file: Path) -> None:
    words = [
        "algorithm.advantage=prime",
        LENGTH,
        "evaluation.source=null",
        "reward_model.optimizer.lr=1e-3",
        "placement.reward_model.where=pool",
        "placement.reward_model.ranks=2",
        "placement.reference.where=pool",
    ]
    summary = train(load_config(config_file, words))
    assert summary["versions"] == 4
    last = rows(config_file.parent / "it")[-1]
    assert last["train/reward_model/grad_norm"] > 0
    assert last["rollout/pool/reward_model/steps"] > 0
