"""The FSDP backend on one process and, really, on two gloo processes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from learner_cases import (
    copied_weights,
    random_group,
    rollout,
    small_config,
    tiny_model,
    without_counts,
)
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.backends.fsdp.masters import _counts_here
from asyncrl.learner.checks.logprob_check import probe_batch
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training.version_step import VersionReport, version_step
from asyncrl.probes import prompts
from asyncrl.sync.layout.layout import Box, from_wire, to_wire
from asyncrl.system.rank_process import end_rank
from asyncrl.types import Group, Sampling, Task


def train(backend: FsdpBackend, config: Config, first: int, steps: int) -> list[VersionReport]:
    """Steps first, first + 1, … on the same three groups each, whoever of the ranks holds them."""
    way = version_step(backend, config)
    reports = []
    for version in range(first, first + steps):
        groups = [random_group(3 * version + i, version=version) for i in range(3)]
        flat = random_group(1000 + version, version=version, spread=False)
        mine = [[*groups, flat]] if backend.world == 1 else [[groups[:2], [groups[2], flat]][backend.rank]]
        for part in (*mine, []):
            way.add(part, version)
        reports.append(way.step(version))
    return reports


def config_in(folder: Path, dtype: str = "float32", tied: bool = True, skip_flat: bool = True) -> Config:
    # A larger eps than the default: gradients of 1e-8 are rounding, which Adam would make steps of lr.
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=1, grad_clip=0.5, eps=1e-5)
    return small_config(
        folder,
        model=tiny_model(folder / "model", tied=tied, dtype=dtype),
        learner=LearnerConfig(micro_batch_tokens=64, optimizer=optimizer, skip_flat_groups=skip_flat),
        algorithm=AlgorithmConfig(proximal="frozen"),
    )


def trained(config: Config, first: int, steps: int) -> tuple[FsdpBackend, list[VersionReport]]:
    backend = FsdpBackend(config)
    return backend, train(backend, config, first, steps)


def accumulate(backend: FsdpBackend) -> None:
    """The gradient of a likelihood, to do something with."""
    backend.policy.accumulate([MicroBatch.of([random_group(0)])], lambda _, logp_N, __: -logp_N.sum())


def rank_main(folder: Path) -> None:
    """One of two ranks: 2 steps, save, 1 step, export; then what it saw."""
    config = config_in(folder)
    backend, reports = trained(config, 0, 2)
    backend.save(folder / "saved_by_two")
    reports += train(backend, config, 2, 1)
    backend.export_hf(folder / "exported_by_two")
    says: dict[str, Any] = {
        "values": [without_counts(r.values) for r in reports],
        "layout": to_wire(backend.layout()),
        "shapes": {name: list(t.shape) for name, t in backend.local_tensors().items()},
        "following": backend.policy.predict_next(probe_batch(prompts(33, 32))).tolist(),
        "exchange": backend.exchange({"rank": backend.rank, "text": "x" * backend.rank}),
    }
    (folder / f"rank{backend.rank}.json").write_text(json.dumps(says))
    backend.close()
    end_rank()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    tiny_model(folder / "model")
    run_ranks("test_fsdp_backend:rank_main", folder)
    return folder, [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


def test_what_may_follow_a_prompt_is_what_predict_says_of_each_token(
    two_ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    alone, _ = trained(config_in(tmp_path), 0, 3)
    asked = prompts(33, 32)
    following_PV = alone.policy.predict_next(probe_batch(asked))
    for prompt, row_V in zip(asked, following_PV, strict=True):
        goes_on = [rollout([*prompt.tolist(), token], len(prompt)) for token in range(33)]
        batch = MicroBatch.of([Group.from_rollouts(Task(0, ""), Sampling(), goes_on)])
        torch.testing.assert_close(alone.policy.predict(batch)[batch.loss_mask_N], row_V, atol=1e-5, rtol=0)
    for says in two_ranks[1]:
        torch.testing.assert_close(torch.tensor(says["following"]), following_PV, atol=1e-4, rtol=0)


def test_two_ranks_train_like_one(two_ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, says = two_ranks
    alone, reports = trained(config_in(tmp_path), 0, 3)
    for rank in says:
        for theirs, ours in zip(rank["values"], reports, strict=True):
            assert theirs == pytest.approx(without_counts(ours.values), rel=1e-4, abs=1e-6)
            assert theirs["train/grad_norm"] == pytest.approx(ours.values["train/grad_norm"], rel=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported_by_two")
    mine = alone.local_tensors()
    for name, tensor in exported.named_parameters():
        torch.testing.assert_close(tensor.detach(), mine[name], atol=2e-5, rtol=0)


def test_the_ranks_boxes_tile_every_parameter_once(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, says = two_ranks
    layouts = [from_wire(rank["layout"]) for rank in says]
    assert "lm_head.weight" not in layouts[0]  # tied to the embedding
    for name, first in layouts[0].items():
        boxes = [box for layout in layouts for box in layout[name].boxes]
        assert sum(box.elements for box in boxes) == Box.whole(first.shape).elements
        assert len(boxes) < 2 or boxes[0].intersection(boxes[1]) is None
        for rank, layout in zip(says, layouts, strict=True):
            assert [list(box.shape) for box in layout[name].boxes] in ([], [rank["shapes"][name]])


def test_small_values_reach_every_rank(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, says = two_ranks
    assert [rank["exchange"] for rank in says] == [[{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]] * 2


def test_a_checkpoint_of_two_ranks_goes_on_with_one(
    two_ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, says = two_ranks
    config = config_in(tmp_path)
    alone = FsdpBackend(config)
    alone.load(folder / "saved_by_two")
    (report,) = train(alone, config, 2, 1)
    assert report.values["train/grad_norm"] == pytest.approx(
        says[0]["values"][2]["train/grad_norm"], rel=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_checkpoint_goes_on_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    config = config_in(tmp_path, dtype)
    through, _ = trained(config, 0, 3)
    stopped, _ = trained(config, 0, 2)
    stopped.save(tmp_path / "saved")
    fresh = FsdpBackend(config)
    fresh.load(tmp_path / "saved")
    train(fresh, config, 2, 1)
    for name, tensor in copied_weights(fresh).items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, through.local_tensors()[name])


@pytest.mark.parametrize("tied", [True, False])
def test_plain_transformers_reads_an_export(tmp_path: Path, tied: bool) -> None:
    backend, _ = trained(config_in(tmp_path, tied=tied), 0, 1)
    backend.export_hf(tmp_path / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert {name for name, _ in model.named_parameters()} == set(backend.local_tensors())
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, backend.local_tensors()[name])


def test_small_updates_survive_half_precision(tmp_path: Path) -> None:
    """A bfloat16 weight near 1 moves by 2^-8 at least; steps of 1e-3 must add up to that."""
    backend = FsdpBackend(config_in(tmp_path, "bfloat16"))
    before = copied_weights(backend)["model.norm.weight"]
    for _ in range(8):
        accumulate(backend)
        backend.policy.optimizer_step(1.0, lr=1e-3)
    assert not torch.equal(before, backend.local_tensors()["model.norm.weight"])


def test_in_half_precision_the_masters_gather_the_gradients_of_all_micro_batches(tmp_path: Path) -> None:
    backend = FsdpBackend(config_in(tmp_path, "bfloat16"))

    def gradient(*ordinals: int) -> torch.Tensor:
        for ordinal in ordinals:  # each a claim of two micro-batches
            batches = [MicroBatch.of([random_group(ordinal, size=size)]) for size in (4, 2)]
            backend.policy.accumulate(batches, lambda _, logp_N, __: -logp_N.sum())
        gathered = backend.policy._masters.tensors["model.norm.weight"].grad.clone()
        backend.policy.forget_gradients()
        return gathered

    torch.testing.assert_close(gradient(0, 1), gradient(0) + gradient(1))


def test_a_step_that_is_not_finite_moves_nothing(tmp_path: Path) -> None:
    backend = FsdpBackend(config_in(tmp_path))
    before = copied_weights(backend)
    accumulate(backend)
    norm = backend.policy.optimizer_step(float("nan"), lr=1.0)
    assert norm != norm
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.local_tensors().items())
    assert backend.policy.optimizer_step(1.0, lr=1.0) == 0.0  # the bad gradient is gone


@pytest.mark.parametrize("share", [0.5, 20.0], ids=["below the limit", "above it"])
def test_the_gradient_that_adam_takes_is_clipped(tmp_path: Path, share: float) -> None:
    """Adam's step hides its size; the first moment after one step is (1 - beta1) times the gradient."""
    config = config_in(tmp_path)
    optimizer = config.learner.optimizer
    backend = FsdpBackend(config)
    accumulate(backend)
    scale = share * optimizer.grad_clip / backend.policy.gradient_norm(1.0)
    norm = backend.policy.optimizer_step(scale, lr=0.0)
    assert norm == pytest.approx(share * optimizer.grad_clip)
    moments = [state["exp_avg"] for state in backend.policy._masters.optimizer.state.values()]
    taken = float(torch.nn.utils.get_total_norm(moments)) / (1 - optimizer.betas[0])
    assert taken == pytest.approx(min(norm, optimizer.grad_clip), rel=1e-4)


def test_the_norm_of_a_step_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks add it up each time that it is computed. More gradient makes another one."""
    backend, computed = FsdpBackend(config_in(tmp_path)), []
    total_norm = torch.nn.utils.get_total_norm

    def counted(tensors: Any) -> torch.Tensor:
        computed.append(total_norm(tensors))
        return computed[-1]

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", counted)
    accumulate(backend)
    once = backend.policy.gradient_norm(0.5)
    assert backend.policy.gradient_norm(1.0) == 2 * once
    accumulate(backend)
    twice = backend.policy.gradient_norm(1.0)
    assert twice == pytest.approx(4 * once)
    assert backend.policy.optimizer_step(1.0, lr=0.0) == twice
    assert len(computed) == 2
    assert backend.policy.gradient_norm(1.0) == 0


def test_a_step_is_adamw_with_the_settings_of_the_optimizer(tmp_path: Path) -> None:
    """Two steps of one parameter by hand, with no setting at its default."""
    base = config_in(tmp_path)
    beta1, beta2, eps, decay, lr = 0.5, 0.75, 0.3, 0.2, 0.1
    optimizer = OptimizerConfig(betas=(beta1, beta2), eps=eps, weight_decay=decay, grad_clip=1e9)
    learner = dataclasses.replace(base.learner, optimizer=optimizer)
    backend, name = FsdpBackend(dataclasses.replace(base, learner=learner)), "model.norm.weight"
    expected = copied_weights(backend)[name]
    first, second = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in (1, 2):
        accumulate(backend)
        gradient = 2.0 * backend.policy._masters.tensors[name].grad
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        size = (second / (1 - beta2**step)).sqrt() + eps
        expected = expected * (1 - lr * decay) - lr * first / (1 - beta1**step) / size
        backend.policy.optimizer_step(2.0, lr)
        torch.testing.assert_close(backend.local_tensors()[name], expected, atol=1e-6, rtol=1e-6)


def test_a_gradient_that_another_stage_counts_too_is_left_out_of_the_norm(tmp_path: Path) -> None:
    """As on the last stage of a pipeline, whose head is the token table of the first."""
    backend = FsdpBackend(config_in(tmp_path))
    accumulate(backend)
    policy = backend.policy
    whole = float(torch.nn.utils.get_total_norm(policy._masters._gradients()))
    repeated = policy._masters.tensors["model.embed_tokens.weight"].grad

    class LastStage:
        def join(self) -> None:
            self.repeated = repeated

    policy._masters.tied = LastStage()
    assert backend.policy.gradient_norm(2.0) == pytest.approx(
        2 * math.sqrt(whole**2 - float(repeated.norm()) ** 2), rel=1e-5
    )


def test_a_part_that_several_ranks_hold_counts_on_the_first_of_them() -> None:
    """On ranks 0 and 1 of a mesh of two that send nothing."""
    counted = []
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2,))
            repeated, sharded = (
                DTensor.from_local(torch.ones(2), mesh, [how], run_check=False)
                for how in (Replicate(), Shard(0))
            )
            counted.append([_counts_here(tensor) for tensor in (repeated, sharded, torch.ones(2))])
        finally:
            dist.destroy_process_group()
    assert counted == [[True, True, True], [False, True, True]]


def test_what_is_staged_stays_as_it_was_while_training_goes_on(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    backend, _ = trained(config, 0, 1)
    staged, write = copied_weights(backend), backend.copy_state()
    train(backend, config, 1, 1)
    write(tmp_path / "saved")
    fresh = FsdpBackend(config)
    fresh.load(tmp_path / "saved")
    assert not torch.equal(staged["model.norm.weight"], backend.local_tensors()["model.norm.weight"])
    for name, tensor in copied_weights(fresh).items():
        assert torch.equal(tensor, staged[name])


def test_random_numbers_of_a_loaded_checkpoint_go_on_where_they_stood(tmp_path: Path) -> None:
    """A loss or an advantage function of the user's own may draw some."""
    config = config_in(tmp_path)
    backend = FsdpBackend(config)
    torch.manual_seed(3)
    torch.rand(5)
    backend.save(tmp_path / "saved")
    expected = torch.rand(5)
    torch.manual_seed(4)
    FsdpBackend(config).load(tmp_path / "saved")
    assert torch.equal(torch.rand(5), expected)


def test_flat_groups_change_nothing_but_the_denominator(tmp_path: Path) -> None:
    groups = [random_group(0), random_group(1, spread=False)]
    norms = {}
    for skip in (True, False):
        config = config_in(tmp_path, skip_flat=skip)
        way = version_step(FsdpBackend(config), config)
        way.add(groups, 0)
        values = way.step(0).values
        norms[skip] = values["train/grad_norm"]
        assert values["rollout/flat_group_fraction"] == 0.5
        assert values["train/groups"] == 2
    assert norms[True] == pytest.approx(norms[False], rel=1e-6)
    only = version_step(FsdpBackend(config), config)
    only.add(groups[:1], 0)
    assert only.step(0).values["train/grad_norm"] > norms[True]
