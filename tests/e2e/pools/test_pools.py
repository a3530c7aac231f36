"""Models beside the policy on pools of their own, in the processes of a run."""

from __future__ import annotations

from pathlib import Path

import own_functions
import pytest
import torch
from own_functions import LENGTH
from processes import (
    child,
    counts_of,
    final_weights,
    finished,
    kill_after,
    rows,
    started,
    succeeded,
    summary_of,
    until_trained,
    versions,
)
from synchronous_runs import synchronous_runs

from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train
from asyncrl.models.loading import load_causal_lm

KL = ["algorithm.kl_loss.coef=0.1", "placement.reference.where=pool"]


TERMS = {
    "reference": ["algorithm.kl_loss.coef=0.1"],
    "teacher": [f"algorithm.teacher_loss.{key}" for key in ("coef=0.1", "form=topk", "top_k=4")],
}


@pytest.mark.slow
@pytest.mark.parametrize("model", TERMS)
def test_the_weights_of_a_synchronous_run_do_not_tell_where_a_model_was(
    config_file: Path, model: str
) -> None:
    here = config_file.parent
    shared = [
        "run.versions=2",
        LENGTH,
        *TERMS[model],
        "learner.optimizer.eps=1e-3",  # a step in the direction of the gradient, which rounding does not turn round
        f"{model}.path={here / 'other'}",
    ]
    config = load_config(config_file, shared)
    load_causal_lm(config.model, seed=7).save_pretrained(here / "other")
    pool = [f"placement.{model}.where=pool", f"placement.{model}.ranks=2"]
    colocated, pooled = synchronous_runs(config_file, shared, colocated=[], pooled=pool)
    start = load_causal_lm(config.model, config.run.seed).state_dict()
    expected, found = final_weights(colocated), final_weights(pooled)
    for name, tensor in expected.items():
        moved = float((tensor - start[name]).abs().max())
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-3 * moved), name
    last = rows(pooled)[-1]
    assert (f"rollout/pool/{model}/groups" in last, last["rollout/generators"]) == (True, 1)
    assert 0 < last.get("train/teacher/mass", 0.5) < 1


def test_a_killed_pool_is_replaced_and_nothing_is_lost(config_file: Path) -> None:
    run = config_file.parent / "it"
    words = [*KL, "run.versions=20", "queue.lease_s=2"]
    with started("asyncrl", "train", str(config_file), *words) as launcher:
        kill_after(run, (2, 6), launcher, "asyncrl", "pool", "reference")
        printed = succeeded(launcher)
    assert "reference-0 ended (killed by SIGKILL) and is started again, 2 of 3 restarts" in printed
    assert counts_of(run) == (20, 80, 0)
    assert summary_of(run)["staleness"]["max"] <= 2


@pytest.mark.slow
def test_a_pool_that_cannot_load_its_model_says_which_key_named_it(config_file: Path) -> None:
    words = [*KL, "reference.path=nowhere"]
    with started(
        "asyncrl", "pool", str(config_file), "reference", "queue.address=tcp://127.0.0.1:1", *words
    ) as pool:
        code, printed = finished(pool)
    assert (code, "reference.path" in printed) == (2, True), printed


@pytest.mark.slow
def test_one_pool_gives_rewards_and_another_log_probs_of_what_passes_the_filter(config_file: Path) -> None:
    run = config_file.parent / "it"
    right = "{function: 'asyncrl.tasks.addition:reward'}"
    functions = f"{{right: {right}, length: {{function: '{own_functions.__file__}:length'}}}}"
    words = [
        "algorithm.advantage=prime",
        "placement.reference.where=pool",
        "reward.function=null",
        f"reward.functions={functions}",
        "placement.rewards.where=pool",
        "placement.rewards.functions=[length]",
        "algorithm.filter=no_spread",
    ]
    summary = train(load_config(config_file, words))
    assert summary["versions"] == 4
    steps = rows(run)
    assert {"rollout/reward/part/right", "rollout/reward/part/length"} <= steps[-1].keys()
    assert steps[-1]["rollout/reward/mean"] > 0
    assert summary["heldout_accuracy_end"] > 0  # by what the pool says of it


@pytest.mark.slow
def test_a_pool_lives_on_when_the_learner_goes_back_to_its_checkpoint(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started(
        "asyncrl", "train", str(config_file), *KL, "run.versions=30", "checkpoint.every=4"
    ) as launcher:
        until_trained(run, 5, launcher)
        pool = child(launcher, "asyncrl", "pool", "reference").pid
        child(launcher, "asyncrl", "learner").kill()
        until_trained(run, 7, launcher)
        assert child(launcher, "asyncrl", "pool", "reference").pid == pool
        succeeded(launcher)
    assert versions(run) == list(range(1, 31))
    assert summary_of(run)["groups_trained"] == 120
