"""The Megatron backend on one, two and four gloo processes: log-probs, gradients and weights are the FSDP backend's.

Megatron-core runs on the CPU by `megatron_shim.py`, in processes of its own. The sizes run one after another, the
single process last: it goes on from everybody's checkpoints.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from learner_cases import saved_bytes
from megatron_cases import (
    batches,
    config_of,
    needs_megatron,
    own,
    says,
    train,
    write_model,
    write_weights,
)
from rank_processes import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.schema import Config, ModelConfig, TeacherConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, TeacherLossConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.models.loading import checkpoint_tensors
from asyncrl.sync.layout.layout import Box, from_wire, to_wire
from asyncrl.sync.tensors.shards import BoxTensors
from asyncrl.system.rank_process import end_rank

pytestmark = [needs_megatron, pytest.mark.timeout(900)]

FAMILIES = (
    *("qwen2", "qwen3", "llama", "mistral", "mixtral", "qwen3_moe", "qwen2_moe"),
    *("deepseek_v3", "deepseek_v3_plain"),
)
DENSE = (*FAMILIES[:4], "qwen2_five")
AGAIN = {"activation_checkpointing": "layers"}
INTERLEAVED = {"pipeline": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2}
CASES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    4: {
        "tensor pipeline": ("qwen2", {"tensor": 2, "pipeline": 2}),
        "data tensor": ("qwen3", {"tensor": 2}),
        "data interleaved": ("qwen2", INTERLEAVED),
        "tensor pipeline expert": ("qwen3_moe", {"tensor": 2, "pipeline": 2, "expert": 2}),
        "data expert": ("mixtral", {"expert": 2}),
        "data context": ("qwen2", {"context": 2}),
        "context tensor": ("qwen3", {"context": 2, "tensor": 2}),
        "context pipeline": ("qwen2", {"context": 2, "pipeline": 2}),
        "context interleaved": ("qwen2", {"context": 2, "context_way": "all_gather", **INTERLEAVED}),
        "context expert": ("qwen3_moe", {"context": 2, "expert": 4}),
        "latent tensor expert": ("deepseek_v3", {"tensor": 2, "expert": 4}),
        "latent pipeline context": ("deepseek_v3", {"pipeline": 2, "context": 2, "expert": 2}),
    },
    2: {
        "data": ("qwen2", {}),
        "tensor": ("qwen2", {"tensor": 2, "sequence": False}),
        "sequence": ("qwen3", {"tensor": 2}),
        "sequence tied": ("qwen2", {"tensor": 2}),
        "pipeline": ("qwen3", {"pipeline": 2}),
        "pipeline tied": ("qwen2", {"pipeline": 2}),
        "interleaved": ("qwen2", INTERLEAVED),
        "expert": ("qwen3_moe", {"expert": 2}),
        "expert tensor": ("qwen2_moe", {"expert": 2, "tensor": 2}),
        "tensor mixtral": ("mixtral", {"tensor": 2}),
        "context": ("qwen3", {"context": 2}),
        "uneven": ("qwen2_five", {"pipeline": 2}),
        "uneven interleaved": ("qwen2_five", INTERLEAVED),
        "recomputed": ("qwen3_moe", {"pipeline": 2, **AGAIN}),
        "latent tensor": ("deepseek_v3", {"tensor": 2, **AGAIN}),
        "latent expert": ("deepseek_v3_plain", {"tensor": 1, "expert": 2}),
        "context gathered": ("qwen3", {"context": 2, "context_way": "all_gather"}),
    },
    1: {family: (family, {}) for family in FAMILIES},
}
EVERY = [(world, name) for world, cases in CASES.items() for name in cases]
OTHERS = [(world, name) for world, name in EVERY if world > 1]
STAND_FOR_ALL = ("sequence tied", "pipeline", "context", "latent tensor")
TAUGHT = STAND_FOR_ALL[:3]
BESIDE = ("critic", "reference")
LOADED: dict[str, dict[str, Any]] = {
    "qwen2 weights": {"tensor": 2, "sequence": False},
    "qwen3 weights": {"pipeline": 2},
    "mixtral weights": {"tensor": 2, "expert": 2},
    "deepseek_v3 weights": {"pipeline": 2},
}
"""Models with weights, in one file or (mixtral) in several."""
READ = ("model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias")
STUCK_S = 300
"""Importing Megatron takes seconds, and four ranks do it at once."""


# ---------------------------------------------------------------------- in the ranks


def of_two_steps(backend: Backend) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "before": says(backend),
        "norms": train(backend, range(2)),
        "after": says(backend),
    }
    return seen | {"layout": to_wire(backend.layout()), "tensors": copied(backend.local_tensors())}


def quick_main(folder: Path) -> None:
    """One of two ranks: the cases that stand for all in `make test`."""
    import megatron_shim

    megatron_shim.install()
    for name in STAND_FOR_ALL:
        backend = made(folder, *CASES[2][name])
        optimizer = backend.policy._optimizer  # type: ignore[attr-defined]
        with mock.patch.object(optimizer, "get_grad_norm", wraps=optimizer.get_grad_norm) as computed:
            seen = of_two_steps(backend)
        seen["norms computed"] = computed.call_count
        if name in TAUGHT:
            seen["taught"] = taught(made(folder, *CASES[2][name], models=("teacher",), taught=True))
        torch.save(seen, folder / f"2 {name} {os.environ['RANK']}")
    family, parallel = CASES[2][STAND_FOR_ALL[0]]
    kept = [saved_bytes(made(folder, family, parallel | again)) for again in ({}, AGAIN)]
    torch.save(kept, folder / f"kept {os.environ['RANK']}")
    torch.save(read_whole(folder), folder / f"whole {os.environ['RANK']}")
    end_rank()


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """A parameter and a constant of a quantized checkpoint, which transformers loads, and the same of the model."""
    from asyncrl.learner.backends.megatron import backend

    path = folder / "deepseek_v3 weights"
    quantized = AutoConfig.from_pretrained(path)
    quantized.quantization_config = {"quant_method": "fp8"}
    model = AutoModelForCausalLM.from_pretrained(path)
    with (
        mock.patch.object(backend, "load_model_config", return_value=quantized),
        mock.patch.object(backend, "load_causal_lm", return_value=model),
    ):
        read = backend._reader(ModelConfig(path=str(path)), 0, "model.path")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor += 1
    return {name: read(name, (8,), Box((2,), (3,))) - model.state_dict()[name][2:5] for name in READ}


def rank_main(folder: Path) -> None:
    """All cases of this world, one after the other: what each said and holds, before and after two steps."""
    import megatron_shim

    megatron_shim.install()
    world, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    for name, (family, parallel) in CASES[world].items():
        backend = made(folder, family, parallel)
        seen = of_two_steps(backend)
        seen["data"] = (backend.data_rank, backend.data_world, backend.is_data_leader)
        seen["gathered"] = backend.gather(torch.tensor([backend.data_rank]))
        backend.export_hf(folder / f"{world} {name} exported")
        if name.startswith("data"):
            write = backend.copy_state()
            train(backend, range(5, 6))  # what is written was copied before
            write(folder / f"{world} {name} saved")
        else:
            backend.save(folder / f"{world} {name} saved")
        torch.save(seen, folder / f"{world} {name} {rank}")
    if world == 2:
        torch.save(half_precision(folder), folder / f"half {rank}")
        for name, parallel in LOADED.items():
            loaded = made(folder, name, parallel)
            torch.save(says(loaded), folder / f"{name} {rank}")
            loaded.export_hf(folder / f"{name} exported")
        for name in ("sequence", "pipeline tied"):
            torch.save(beside(folder, *CASES[2][name]), folder / f"beside {name} {rank}")
    if world == 4:
        torch.save(went_on(folder, "by fsdp", *CASES[4]["tensor pipeline"]), folder / f"on {rank}")
    if world == 1:
        for other, name in OTHERS:
            on = went_on(folder, f"{other} {name} saved", CASES[other][name][0], {})
            torch.save(on, folder / f"{other} {name} on")
    end_rank()


def made(
    folder: Path,
    family: str,
    parallel: dict[str, Any],
    dtype: str = "float32",
    models: Any = (),
    taught: bool = False,
) -> Backend:
    """A Megatron backend, in place of the last one."""
    from megatron.core import parallel_state

    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    parallel_state.destroy_model_parallel()
    config = config_of(folder, family, "megatron", dtype, **parallel)
    return MegatronBackend(with_teacher(config) if taught else config, models)


def with_teacher(config: Config) -> Config:
    """The policy as it is at the beginning teaches its three most likely tokens."""
    algorithm = AlgorithmConfig(teacher_loss=TeacherLossConfig(coef=1.0, form="topk", top_k=3))
    return dataclasses.replace(config, algorithm=algorithm, teacher=TeacherConfig(config.model.path))


def taught(backend: Backend) -> dict[str, Any]:
    """What the teacher gives, and a step of the policy by the log-probs of what it gave, after one that moved it."""
    train(backend, range(1))
    given = [backend.models["teacher"].predict(batch) for batch in batches(1)]
    every = [
        batch.with_columns(likeliest=values[:, 5:].int())
        for batch, values in zip(batches(1), given, strict=True)
    ]

    def loss(
        batch: MicroBatch, logp_N: torch.Tensor, entropy_N: torch.Tensor, outcome_NO: torch.Tensor
    ) -> Any:
        return (outcome_NO * torch.tensor([1.0, -0.5, 0.25, 0.5])).sum() + entropy_N.sum()

    backend.policy.accumulate(own(every, backend), loss)
    norm = backend.policy.optimizer_step(0.1, lr=1e-2)
    return {"given": given, "norm": norm, "says": says(backend)}


def went_on(folder: Path, saved: str, family: str, parallel: dict[str, Any]) -> list[float]:
    """The norms of the third step, from a checkpoint after two."""
    backend = made(folder, family, parallel)
    backend.load(folder / saved)
    return train(backend, range(2, 3))


def half_precision(folder: Path) -> tuple[bool, dict[str, Any]]:
    """Whether a run in bfloat16 that goes on from its checkpoint has every bit of one that went through; and what it
    said before."""
    through = made(folder, "qwen3", {"tensor": 2}, "bfloat16")
    before = says(through)
    train(through, range(2))
    through.save(folder / "half")
    train(through, range(2, 3))
    kept = copied(through.local_tensors())
    again = made(folder, "qwen3", {"tensor": 2}, "bfloat16")
    again.load(folder / "half")
    train(again, range(2, 3))
    found = copied(again.local_tensors())
    same = all(torch.equal(a, b) for name in kept for a, b in zip(kept[name], found[name], strict=True))
    return same, before


def beside(folder: Path, family: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """A critic that learns, and a reference that follows the policy, through a checkpoint."""
    backend = made(folder, family, parallel, models=BESIDE)
    said = follow(backend)
    backend.save(folder / f"beside {parallel}")
    again = made(folder, family, parallel, models=BESIDE)
    again.load(folder / f"beside {parallel}")
    said["again"] = [again.models[name].predict(batches(7)[1]) for name in BESIDE]
    return said


def follow(backend: Backend) -> dict[str, Any]:
    train(backend, range(1))
    backend.models["reference"].copy_from_policy()
    critic, norms = backend.models["critic"], []
    for step in range(2):
        critic.accumulate(own(batches(step), backend), lambda batch, value_N: (value_N - 1.0).square().sum())
        norms.append(critic.optimizer_step(0.1, lr=1e-2))
    return {"norms": norms, "says": [backend.models[name].predict(batches(7)[1]) for name in BESIDE]}


def copied(tensors: Mapping[str, BoxTensors]) -> dict[str, list[torch.Tensor]]:
    every = {name: [held] if isinstance(held, torch.Tensor) else held for name, held in tensors.items()}
    return {name: [view.clone() for view in views] for name, views in every.items()}


# ---------------------------------------------------------------------- here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    for family in (*FAMILIES, *DENSE):
        write_model(folder / family, family)  # ranks share it
    for name in LOADED:
        small_files = {"max_shard_size": "30KB"} if name.startswith("mixtral") else {}
        write_weights(folder / name, name.split()[0], **small_files)
    alone = FsdpBackend(config_of(folder, "qwen2"))
    train(alone, range(2))
    alone.save(folder / "by fsdp")
    for world in CASES:
        run_ranks("test_megatron_backend:rank_main", folder, world, STUCK_S)
    return folder


def put_together(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Whole parameters of all ranks' boxes; where several have one, it must be the same."""
    whole: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, param in from_wire(rank["layout"]).items():
            into = whole.setdefault(name, torch.full(param.shape, torch.nan))
            for box, view in zip(param.boxes, rank["tensors"][name], strict=True):
                there = into[box.slices()]
                assert torch.equal(there, view) or bool(there.isnan().all()), f"{name} {box}"
                into[box.slices()] = view
    return whole


def close(theirs: Any, ours: Any, atol: float = 2e-6) -> None:
    torch.testing.assert_close(theirs, ours, atol=atol, rtol=1e-5)


def assert_the_same(folder: Path, world: int, name: str) -> None:
    """As the other backend, before and after two steps, on every rank."""
    family, _ = CASES[world][name]
    ranks = [torch.load(folder / f"{world} {name} {rank}", weights_only=False) for rank in range(world)]
    alone = FsdpBackend(config_of(folder, family))
    before, norms, after = says(alone), train(alone, range(2)), says(alone)
    for rank in ranks:
        close(rank["before"], before)
        close(rank["norms"], norms)
        close(rank["after"], after)
    whole = put_together(ranks)
    assert whole.keys() == alone.local_tensors().keys()
    for parameter, tensor in alone.local_tensors().items():
        close(whole[parameter], tensor)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for name in STAND_FOR_ALL:
        write_model(folder / CASES[2][name][0], CASES[2][name][0])
    write_weights(folder / "deepseek_v3 weights", "deepseek_v3")
    run_ranks("test_megatron_backend:quick_main", folder, 2, STUCK_S)
    return folder


@pytest.mark.parametrize("name", STAND_FOR_ALL)
def test_two_ranks_say_and_learn_what_the_other_backend_does(two_ranks: Path, name: str) -> None:
    assert_the_same(two_ranks, 2, name)


def test_a_quantized_checkpoint_is_read_by_transformers(two_ranks: Path) -> None:
    for rank in range(2):
        off = torch.load(two_ranks / f"whole {rank}")
        assert all(torch.equal(off[name], torch.zeros_like(off[name])) for name in READ)


def test_layers_that_are_computed_again_keep_little_for_the_backward_pass(two_ranks: Path) -> None:
    for rank in range(2):
        plain, again = torch.load(two_ranks / f"kept {rank}", weights_only=False)
        assert again < 0.5 * plain


@pytest.mark.parametrize("name", TAUGHT)
def test_a_teacher_gives_its_most_likely_tokens_as_with_the_other_backend(two_ranks: Path, name: str) -> None:
    alone = taught(FsdpBackend(with_teacher(config_of(two_ranks, CASES[2][name][0])), ("teacher",)))
    assert (alone["given"][0][:, 1] >= alone["given"][0][:, 2]).all()
    for rank in range(2):
        close(torch.load(two_ranks / f"2 {name} {rank}", weights_only=False)["taught"], alone)


def test_the_norm_is_computed_once_a_step(two_ranks: Path) -> None:
    seen = torch.load(two_ranks / f"2 {STAND_FOR_ALL[0]} 0", weights_only=False)
    assert seen["norms computed"] == len(seen["norms"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_it_says_and_learns_what_the_other_backend_does(folder: Path, world: int, name: str) -> None:
    assert_the_same(folder, world, name)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_plain_transformers_reads_an_export(folder: Path, world: int, name: str) -> None:
    ranks = [torch.load(folder / f"{world} {name} {rank}", weights_only=False) for rank in range(world)]
    exported = AutoModelForCausalLM.from_pretrained(folder / f"{world} {name} exported")
    tensors, whole = checkpoint_tensors(exported), put_together(ranks)
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[parameter], whole[parameter]) for parameter in whole)


@pytest.mark.slow
def test_biases_of_routers_are_in_an_export_as_in_the_checkpoint(folder: Path) -> None:
    """They are on two stages."""
    before, after = (
        {
            name: held
            for name, held in AutoModelForCausalLM.from_pretrained(at).state_dict().items()
            if "bias" in name
        }
        for at in (folder / "deepseek_v3 weights", folder / "deepseek_v3 weights exported")
    )
    assert len(before) == 3
    assert all(held.abs().max() > 0 and torch.equal(held, after[name]) for name, held in before.items())


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), OTHERS)
def test_checkpoints_go_on_at_another_size_and_with_the_other_backend(
    folder: Path, world: int, name: str
) -> None:
    family, _ = CASES[world][name]
    alone = FsdpBackend(config_of(folder, family))
    through = train(alone, range(3))[2:]
    close(torch.load(folder / f"{world} {name} on"), through)
    if family in DENSE:
        loaded = FsdpBackend(config_of(folder, family))
        loaded.load(folder / f"{world} {name} saved")
        exported = FsdpBackend(config_of(folder, family))
        exported.load_policy(folder / f"{world} {name} saved")
        close(says(exported), says(loaded))
        close(train(loaded, range(2, 3)), through)
    else:
        with pytest.raises(ConfigError, match=r"or its experts by megatron"):
            FsdpBackend(config_of(folder, family)).load_policy(folder / f"{world} {name} saved")


@pytest.mark.slow
def test_the_other_backends_checkpoint_goes_on_here(folder: Path) -> None:
    alone = FsdpBackend(config_of(folder, "qwen2"))
    through = train(alone, range(3))[2:]
    for rank in range(4):
        close(torch.load(folder / f"on {rank}"), through)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADED)
def test_ranks_read_their_boxes_of_a_checkpoint(folder: Path, name: str) -> None:
    files = len(list((folder / name).glob("*.safetensors")))
    assert (files > 1) == name.startswith("mixtral")
    ours = says(FsdpBackend(config_of(folder, name)))
    for rank in range(2):
        close(torch.load(folder / f"{name} {rank}"), ours)


@pytest.mark.slow
def test_each_data_rank_is_gathered_once(folder: Path) -> None:
    for world, name in EVERY:
        ranks = [torch.load(folder / f"{world} {name} {rank}", weights_only=False) for rank in range(world)]
        data_world = ranks[0]["data"][1]
        assert sorted(rank["data"][0] for rank in ranks if rank["data"][2]) == list(range(data_world))
        assert [int(said) for said in ranks[0]["gathered"]] == list(range(data_world))


@pytest.mark.slow
def test_a_loaded_checkpoint_goes_on_bit_for_bit_in_half_precision(folder: Path) -> None:
    ours = says(FsdpBackend(config_of(folder, "qwen3", dtype="bfloat16")))
    for rank in range(2):
        same, before = torch.load(folder / f"half {rank}", weights_only=False)
        assert same
        torch.testing.assert_close(before, ours, atol=5e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence", "pipeline tied"])
def test_models_beside_the_policy(folder: Path, name: str) -> None:
    family, _ = CASES[2][name]
    ours = follow(FsdpBackend(config_of(folder, family), BESIDE))
    for rank in range(2):
        theirs = torch.load(folder / f"beside {name} {rank}", weights_only=False)
        close(theirs["norms"], ours["norms"])
        close(theirs["says"], ours["says"], atol=2e-5)
        close(theirs["again"], theirs["says"])
