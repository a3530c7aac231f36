"""Models beside the policy on pools of their own, in the processes of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import child, final_weights, finished, rows, started, trained, until

from asyncrl.config.load import load_config
from asyncrl.launch.local import train
from asyncrl.models import load_causal_lm

KL = ["algorithm.kl_loss.coef=0.1", "placement.reference.where=pool"]
OWN = Path(__file__).parents[1].joinpath("own_functions.py")


@pytest.mark.slow
def test_the_weights_of_a_synchronous_run_do_not_tell_where_its_reference_was(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = config_file.parent
    shared = [
        "run.versions=2",
        "queue.max_staleness=0",
        "evaluation.source=null",
        f"reward.function='{OWN}:length'",
        "algorithm.kl_loss.coef=0.1",
        "learner.optimizer.eps=1e-3",  # a step in the direction of the gradient, which rounding does not turn round
        f"reference.path={here / 'reference'}",
    ]
    config = load_config(config_file, shared)
    load_causal_lm(config.model, seed=7).save_pretrained(here / "reference")
    pool = ["placement.reference.where=pool", "placement.reference.ranks=2"]
    for name, words in (("colocated", []), ("pooled", pool)):
        summary = train(load_config(config_file, [*shared, f"run.name={name}", *words]))
        assert (summary["versions"], summary["staleness"]["max"]) == (2, 0)
    start = load_causal_lm(config.model, config.run.seed).state_dict()
    expected, found = final_weights(here / "colocated"), final_weights(here / "pooled")
    for name, tensor in expected.items():
        moved = float((tensor - start[name]).abs().max())
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-3 * moved), name
    last = rows(here / "pooled")[-1]
    assert ("pool/reference/groups" in last, last["generators"]) == (True, 1)


def test_a_killed_pool_is_replaced_and_nothing_is_lost(config_file: Path) -> None:
    run = config_file.parent / "it"
    words = [*KL, "run.versions=20", "queue.lease_s=2"]
    with started("asyncrl", "train", str(config_file), *words) as launcher:
        for version in (2, 6):
            until(trained(run, version), f"version {version}", launcher)
            pool = child(launcher, "asyncrl", "pool", "reference")
            pool.kill()
            pool.wait()
        code, printed = finished(launcher)
    assert code == 0, printed
    assert "reference-0 ended (killed by SIGKILL) and is started again, 2 of 3 restarts" in printed
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["groups_trained"], summary["tasks_dropped"]) == (80, 0)
    assert summary["staleness"]["max"] <= 2


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
    functions = f"{{right: {right}, length: {{function: '{OWN}:length'}}}}"
    words = [
        *KL,
        "reward.function=null",
        f"reward.functions={functions}",
        "placement.rewards.where=pool",
        "placement.rewards.functions=[length]",
        "algorithm.filter=no_spread",
    ]
    summary = train(load_config(config_file, words))
    assert summary["versions"] == 4
    steps = rows(run)
    assert {"reward/part/right", "reward/part/length"} <= steps[-1].keys()
    assert steps[-1]["reward/mean"] > 0
    assert summary["heldout_accuracy_end"] > 0  # by what the pool says of it


@pytest.mark.slow
def test_a_pool_lives_on_when_the_learner_goes_back_to_its_checkpoint(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started(
        "asyncrl", "train", str(config_file), *KL, "run.versions=30", "checkpoint.every=4"
    ) as launcher:
        until(trained(run, 5), "version 5", launcher)
        pool = child(launcher, "asyncrl", "pool", "reference").pid
        child(launcher, "asyncrl", "learner").kill()
        until(trained(run, 7), "version 7", launcher)
        assert child(launcher, "asyncrl", "pool", "reference").pid == pool
        code, printed = finished(launcher)
    assert code == 0, printed
    assert [row["version"] for row in rows(run)] == list(range(1, 31))
    assert json.loads((run / "summary.json").read_text())["groups_trained"] == 120
