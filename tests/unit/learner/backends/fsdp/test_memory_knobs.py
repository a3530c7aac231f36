"""Activation checkpointing, compiled layers, half precision, parked optimizer state: less memory, the same training."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from learner_cases import random_group, same, saved_bytes, small_config, tiny_model

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.backends.fsdp.offload import Offload, ParkedState, in_a_file
from asyncrl.learner.data.batch import MicroBatch


def config_in(folder: Path, dtype: str = "float32", **learner: object) -> Config:
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=1)
    return small_config(
        folder,
        model=tiny_model(folder / "model", dtype=dtype),
        learner=LearnerConfig(micro_batch_tokens=64, optimizer=optimizer, **learner),  # type: ignore[arg-type]
    )


def gradients(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    """Of two micro-batches of different sizes, by parameter."""
    batches = [MicroBatch.of([random_group(0)]), MicroBatch.of([random_group(1, size=3)])]
    backend.policy.accumulate(batches, lambda _, logp_N, entropy_N: 0.1 * entropy_N.sum() - logp_N.sum())
    masters = backend._models["policy"].state().masters
    return {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointed_layers_have_the_same_gradient_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    plain = gradients(FsdpBackend(config_in(tmp_path, dtype)))
    again = gradients(FsdpBackend(config_in(tmp_path, dtype, activation_checkpointing="layers")))
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert {grad.dtype for grad in plain.values()} == {torch.float32}


def test_checkpointed_layers_keep_little_for_the_backward_pass(tmp_path: Path) -> None:
    plain = saved_bytes(FsdpBackend(config_in(tmp_path)))
    assert saved_bytes(FsdpBackend(config_in(tmp_path, activation_checkpointing="layers"))) < 0.3 * plain


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradient(tmp_path: Path) -> None:
    """Under checkpointing, which is the harder case; parameters keep their names."""
    plain = gradients(FsdpBackend(config_in(tmp_path)))
    compiled = FsdpBackend(config_in(tmp_path, compile=True, activation_checkpointing="layers"))
    torch.testing.assert_close(gradients(compiled), plain, atol=1e-5, rtol=1e-4)


def test_offloading_that_saves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.offload = .*this learner is on the CPU"):
        FsdpBackend(config_in(tmp_path, offload="optimizer"))
    with pytest.raises(ConfigError, match=r"learner\.offload_folder = .*must be a folder"):
        FsdpBackend(config_in(tmp_path, offload="disk", offload_folder=str(tmp_path / "nowhere")))
    for one_of_two in ({"offload": "disk"}, {"offload_folder": str(tmp_path)}):
        with pytest.raises(ConfigError, match=r"learner\.offload_folder = .*goes with learner\.offload=disk"):
            config_in(tmp_path, **one_of_two)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["host", "disk"])
def test_parked_state_has_no_storage_and_comes_back_bit_for_bit(place: str, tmp_path: Path) -> None:
    offload = Offload(tmp_path if place == "disk" else None)

    def trained(parks: bool) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        weight = torch.randn(4, 3, requires_grad=True)
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        state, left = ParkedState(optimizer, offload), -1
        for step in range(4):
            weight.grad = torch.full_like(weight, step - 1.5)
            state.fetch()
            optimizer.step()
            if parks:
                state.park()
                state.park()
                moments = [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
                left = sum(moment.untyped_storage().nbytes() for moment in moments)
        state.fetch()
        return torch.cat([weight.detach(), optimizer.state[weight]["exp_avg_sq"]]), left

    parked, left = trained(parks=True)
    assert left == 0
    assert torch.equal(parked, trained(parks=False)[0])


def test_a_learner_with_its_state_on_disk_goes_the_same_way(tmp_path: Path) -> None:
    """Bit for bit, through a checkpoint too; the folder has no file that anybody would have to clean up."""
    places: dict[str, dict[str, object]] = {
        "here": {},
        "disk": {"offload": "disk", "offload_folder": str(tmp_path / "nvme")},
    }
    (tmp_path / "nvme").mkdir()
    weights = {}
    for place, learner in places.items():
        config = config_in(tmp_path, **learner)
        backend, again = FsdpBackend(config), FsdpBackend(config)
        for _ in range(2):
            step(backend)
        if place == "disk":
            assert state_bytes(backend) == 0
        backend.save(tmp_path / place)
        again.load(tmp_path / place)
        step(backend), step(again)
        assert same(backend.local_tensors(), again.local_tensors())
        weights[place] = backend.local_tensors()
    assert same(weights["here"], weights["disk"])
    assert not list((tmp_path / "nvme").iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_backend_that_is_parked_between_and_within_steps_goes_the_same_way(
    tmp_path: Path, dtype: str
) -> None:
    """For `placement.colocate`. Meanwhile nothing of the model, its gradients and Adam's moments has memory here."""
    weights = []
    for parks in (False, True):
        backend = FsdpBackend(config_in(tmp_path, dtype), models=["reference"])
        for _ in range(2):
            gradients(backend)
            if parks:
                parked_and_back(backend)
            backend.policy.optimizer_step(0.1, lr=1e-2)
            if parks:
                parked_and_back(backend)
        weights.append({name: tensor.clone() for name, tensor in backend.local_tensors().items()})
    assert same(*weights)


def parked_and_back(backend: FsdpBackend) -> None:
    masters = backend.policy._masters.tensors.values()
    gradients = [master.grad for master in masters if master.grad is not None]
    live = [tensor for model in backend._models.values() for tensor in model.live() if tensor.dim() > 0]
    live += gradients
    backend.park()
    assert {tensor.untyped_storage().nbytes() for tensor in live} == {0}
    backend.fetch()


def step(backend: FsdpBackend) -> None:
    gradients(backend)
    backend.policy.optimizer_step(0.1, lr=1e-2)


def state_bytes(backend: FsdpBackend) -> int:
    """Memory that Adam's moments take now."""
    optimizer = backend.policy._masters.optimizer
    assert optimizer is not None
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert moments
    return sum(moment.untyped_storage().nbytes() for moment in moments)


def test_memory_in_a_file_is_of_the_file_and_its_room_is_taken_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    made = in_a_file(tmp_path, like)
    assert Path(str(made.untyped_storage().filename)).parent == tmp_path
    assert (made.shape, made.dtype) == (like.shape, like.dtype)
    assert torch.equal(made.copy_(like), like)
    assert not in_a_file(tmp_path, torch.empty(0, 3)).numel()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        in_a_file(tmp_path, like)
    assert not list(tmp_path.iterdir())


def test_small_knobs_are_checked() -> None:
    with pytest.raises(ConfigError, match="peak_tflops"):
        Config(learner=LearnerConfig(peak_tflops=0.0))
