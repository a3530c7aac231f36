"""A model of a pool that is split over two ranks, really, over gloo."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import numpy as np
import torch
from learner_cases import random_group, small_config, tiny_model
from rank_processes import run_ranks

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.pool import model as pool_model
from asyncrl.pool.model import InferenceModel
from asyncrl.system.rank_process import end_rank
from asyncrl.types import Group

SIZES = (12, 1, 4)
"""Of groups: more passes than ranks, a pass for one rank alone, a pass for each."""


def config_of(folder: Path) -> Config:
    return small_config(
        folder,
        model=tiny_model(folder / "model", dtype="float64"),
        learner=LearnerConfig(micro_batch_tokens=24),
    )


def groups() -> list[Group]:
    """As another pool has left them."""
    made = [random_group(ordinal, size) for ordinal, size in enumerate(SIZES)]
    return [dataclasses.replace(one, columns={"teacher": np.zeros(one.tokens, np.float32)}) for one in made]


def rank_main(folder: Path) -> None:
    pool_model.HEARTBEAT_S = 0.001  # many of them between two groups
    model = InferenceModel("reference", config_of(folder))
    if os.environ["RANK"] == "0":
        said = [torch.from_numpy(asyncio.run(model.columns(group))["reference"]) for group in groups()]
        torch.save(said, folder / "said.pt")
        model.close()
    else:
        model.follow()
        held = sum(shard.numel() for shard in model._model.in_checkpoint()[1].values())
        torch.save(held, folder / "held.pt")
    end_rank()


def test_two_ranks_say_together_what_one_says_alone(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    run_ranks("test_split_pool:rank_main", tmp_path)
    backend = FsdpBackend(config_of(tmp_path), ["reference"])
    for said, group in zip(torch.load(tmp_path / "said.pt"), groups(), strict=True):
        expected = backend.models["reference"].predict(MicroBatch.of([group]))
        assert torch.allclose(said, expected, atol=1e-6)
    whole = sum(tensor.numel() for tensor in backend.local_tensors().values())
    assert torch.load(tmp_path / "held.pt") < 0.6 * whole
