"""A checkpoint knows nothing of the processes that made it: written beside training by two ranks, it is gone on from by
one, by four, by two copies of two shards, and with tensor parallelism."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from learner_cases import random_group, small_config, tiny_model
from rank_processes import run_ranks
from safetensors.torch import load_file
from trainer_cases import checkpoints_of, newest

from asyncrl.config.schema import Config, CriticConfig, LearnerConfig
from asyncrl.config.sections.learner import OptimizerConfig, ParallelConfig
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.checkpoint import STATE, Meta, read_meta
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.export import export
from asyncrl.system.rank_process import end_rank

ALONE = ParallelConfig()
META = Meta(2, train=b"frontier", eval=None, controls={"kl_coef": 0.5})


def config_in(folder: Path, parallel: ParallelConfig = ALONE) -> Config:
    optimizer = OptimizerConfig(lr=1e-2, grad_clip=0.5)
    return small_config(
        folder,
        model=tiny_model(folder / "model", dtype="bfloat16"),  # with masters
        learner=LearnerConfig(optimizer=optimizer, parallel=parallel),
        critic=CriticConfig(optimizer=optimizer),
    )


def backend_of(folder: Path, parallel: ParallelConfig = ALONE) -> FsdpBackend:
    return FsdpBackend(config_in(folder, parallel), ("critic",))


def step(backend: FsdpBackend, number: int) -> list[float]:
    """Of the policy and the critic, on the same four groups whoever has which; the gradient norms."""
    groups = [random_group(4 * number + i) for i in range(4)]
    mine = [MicroBatch.of(groups[backend.data_rank :: backend.data_world])]
    backend.policy.accumulate(mine, lambda batch, logp_N, entropy_N: -logp_N.sum())
    backend.models["critic"].accumulate(mine, lambda batch, value_N: (value_N - 1).square().sum())
    return [model.optimizer_step(1 / 50, lr=1e-2) for model in (backend.policy, backend.models["critic"])]


def after_step(backend: FsdpBackend, number: int) -> dict[str, Any]:
    norms, batch = step(backend, number), MicroBatch.of([random_group(100)])
    said = [model.predict(batch).tolist() for model in (backend.policy, backend.models["critic"])]
    return {"norms": norms, "said": said}


def forbid_pickles() -> None:
    """From here on this process makes no pickle for another rank."""

    def refused(*_: Any) -> Any:
        raise AssertionError("a pickle for another rank")

    dist.distributed_c10d._object_to_tensor = refused


def save_main(folder: Path) -> None:
    """One of two ranks: two steps, and a third one while the two are being written. No rank sends a pickle."""
    forbid_pickles()
    backend = backend_of(folder)
    for number in range(2):
        step(backend, number)
    saver = checkpoints_of(folder, backend)
    torch.manual_seed(7)
    saver.begin(META)
    torch.manual_seed(8)
    says = after_step(backend, 2)
    assert saver.finish() == META.version
    backend.export_hf(folder / "final")
    (folder / f"saved{backend.rank}.json").write_text(json.dumps(says))
    backend.close()
    end_rank()


def go_on(folder: Path, parallel: ParallelConfig = ALONE) -> dict[str, Any]:
    backend, found = backend_of(folder, parallel), newest(folder)
    assert found is not None
    backend.load(found / STATE)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())
    return after_step(backend, 2)


def load_main(folder: Path) -> None:
    """One of four ranks: as four shards, two copies of two shards, and two shards that share each matrix with another
    rank."""
    forbid_pickles()
    meshes = (ALONE, ParallelConfig(replicate=2), ParallelConfig(tensor=2))
    says = [go_on(folder, parallel) for parallel in meshes]
    (folder / f"loaded{os.environ['RANK']}.json").write_text(json.dumps(says))
    end_rank()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    config_in(folder)
    run_ranks("test_checkpoint_meshes:save_main", folder)
    return folder


def assert_same(folder: Path, says: dict[str, Any]) -> None:
    """The third step of the two ranks that went on without a stop."""
    for rank in range(2):
        theirs = json.loads((folder / f"saved{rank}.json").read_text())
        assert says["norms"] == pytest.approx(theirs["norms"], rel=2**-9)  # half a step of bfloat16
        for mine, others in zip(says["said"], theirs["said"], strict=True):
            assert mine == pytest.approx(others, abs=2e-2)  # of weights in bfloat16


def test_one_process_goes_on(folder: Path) -> None:
    assert_same(folder, go_on(folder))


def test_what_two_ranks_saved_is_exported_by_one(folder: Path, tmp_path: Path) -> None:
    backend, found = backend_of(folder), newest(folder)
    assert found is not None
    backend.load(found / STATE)
    assert export(config_in(folder, ParallelConfig(replicate=2)), folder, tmp_path / "out") == META.version
    written = load_file(next((tmp_path / "out").glob("*.safetensors")))
    expected = backend.local_tensors()
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


@pytest.mark.timeout(300)
def test_four_processes_go_on(folder: Path) -> None:
    run_ranks("test_checkpoint_meshes:load_main", folder, world=4)
    for rank in range(4):
        for says in json.loads((folder / f"loaded{rank}.json").read_text()):
            assert_same(folder, says)


def test_all_that_a_run_goes_on_from_is_in_a_checkpoint(folder: Path) -> None:
    """Schedules of learning rates are functions of the version (`Trainable.lr`), task order and samples of seed and
    ordinal; the ledger's frontier is in the streams' snapshots, and everything adapted on the way in the controls."""
    whole = newest(folder)
    assert whole is not None
    assert read_meta(whole) == META
    assert {field.name for field in dataclasses.fields(Meta)} == {
        "version",
        "train",
        "eval",
        "controls",
        "format",
    }
    backend = backend_of(folder)
    policy, critic = (
        model.state().masters for model in (backend._models["policy"], backend._models["critic"])
    )
    moments = ("exp_avg", "exp_avg_sq", "step")
    expected = {"rng"} | {f"policy.{name}" for name in policy} | {f"critic.{name}" for name in critic}
    expected |= {f"optimizer.{moment}.{name}" for moment in moments for name in policy}
    expected |= {f"optimizer.{moment}.critic.{name}" for moment in moments for name in critic}
    kept = dcp.FileSystemReader(whole / "learner").read_metadata().state_dict_metadata
    assert kept.keys() == expected
    assert {kept[f"policy.{name}"].properties.dtype for name in policy} == {torch.float32}  # the masters
