"""A model of a pool that learns, split over two ranks, really, over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from learner_cases import random_group, small_config, tiny_model
from rank_processes import run_ranks

from asyncrl.config.schema import Config, LearnerConfig, RewardModelConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.remote import remote_protocol
from asyncrl.learner.training.passes import PassResult
from asyncrl.pool import model as pool_model
from asyncrl.pool.trained_model import TrainedModel
from asyncrl.system.rank_process import end_rank

BATCHES = 3
"""More than ranks: in its last pass one of them has nobody's tokens."""


def config_of(folder: Path) -> Config:
    return small_config(
        folder,
        model=tiny_model(folder / "model", dtype="float64"),
        learner=LearnerConfig(micro_batch_tokens=24),
        algorithm=AlgorithmConfig(advantage="prime"),
        reward_model=RewardModelConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1)),
        placement=PlacementConfig(reward_model=PlaceConfig(where="pool", ranks=2)),
    )


def lessons(model: TrainedModel, folder: Path) -> dict[str, object]:
    """What two steps find, and what the model says after each; saved after the first, which is gone back to."""
    batches = []
    for ordinal in range(BATCHES):
        batch = MicroBatch.of([random_group(ordinal)])
        columns = {"reference": torch.zeros(batch.tokens), "outcome": batch.rewards_R[batch.seq_N]}
        batches.append(remote_protocol.encode_batch(batch.with_columns(**columns), model.reads))
    model.together("begin", {"checkpoint": None})
    said, losses, norms = [model.predict(random_group(0))], [], []
    for step in range(2):
        found = model.together("learn", {"version": step, "batches": batches})
        losses.append([PassResult.from_wire(each).loss for each in found])
        norms.append(model.together("norm", {"scale": 0.1}))
        model.together("step", {"scale": 0.1, "lr": 0.01})
        said.append(model.predict(random_group(0)))
        if step == 0:
            model.together("save", {"folder": ".v000001.partial"})
    checkpoints = folder / "case" / "checkpoints"
    (checkpoints / ".v000001.partial").rename(checkpoints / "v000001")
    model.together("begin", {"checkpoint": "v000001"})
    said.append(model.predict(random_group(0)))
    model.together("begin", {"checkpoint": None})
    said.append(model.predict(random_group(0)))
    return {"losses": losses, "norms": norms, "said": said}


def rank_main(folder: Path) -> None:
    pool_model.HEARTBEAT_S = 0.01
    model = TrainedModel("reward_model", config_of(folder))
    if os.environ["RANK"] == "0":
        torch.save(lessons(model, folder), folder / "found.pt")
        model.close()
    else:
        model.follow()
    end_rank()


def test_two_ranks_learn_together_what_one_learns_alone(tmp_path: Path) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    for folder in (together, alone):
        tiny_model(folder / "model")
    run_ranks("test_split_taught_pool:rank_main", together)
    expected = lessons(TrainedModel("reward_model", config_of(alone)), alone)
    found = torch.load(together / "found.pt")
    for name in ("losses", "norms"):
        assert torch.allclose(torch.tensor(found[name]), torch.tensor(expected[name]), rtol=1e-9), name
    for mine, theirs in zip(found["said"], expected["said"], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    start, first, second, again, anew = found["said"]
    assert torch.equal(first, again)
    assert torch.equal(start, anew)
    assert not torch.equal(first, second)
