"""Adapters in place of weights: what learns, what is published, saved and exported, on one process and on two ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from learner_cases import copied_weights, random_group, small_config, tiny_model
from peft import PeftModel, get_peft_model
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config, LearnerConfig, ModelConfig, ReferenceConfig
from asyncrl.config.sections.generator import GeneratorConfig, ServerConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.config.sections.models import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.lora import ADAPTER
from asyncrl.models.loading import load_causal_lm
from asyncrl.sync.layout.layout import from_wire, to_wire
from asyncrl.system.rank_process import end_rank

TARGETS = ("q_proj", "down_proj")
BATCH = MicroBatch.of([random_group(100)])


def config_in(
    folder: Path,
    rank: int = 2,
    dtype: str = "float32",
    targets: tuple[str, ...] = TARGETS,
    publish: Literal["adapter", "merged"] = "merged",
) -> Config:
    path = tiny_model(folder / "model").path
    lora = LoraConfig(rank=rank, alpha=6.0, targets=targets, publish=publish)
    model: Any = ModelConfig(path=path, dtype=dtype, lora=lora)  # type: ignore[arg-type]
    return small_config(folder, model=model, learner=LearnerConfig(optimizer=OptimizerConfig(grad_clip=0.5)))


def step(backend: FsdpBackend, number: int) -> float:
    groups = [random_group(2 * number + i) for i in range(2)]
    mine = [MicroBatch.of(groups[backend.data_rank :: backend.data_world])]
    backend.policy.accumulate(mine, lambda batch, logp_N, entropy_N: -logp_N.sum())
    return backend.policy.optimizer_step(1 / 10, lr=1e-2)


def trained(config: Config, steps: int = 3) -> FsdpBackend:
    backend = FsdpBackend(config, ("reference",))
    for number in range(steps):
        step(backend, number)
    return backend


def rank_main(folder: Path) -> None:
    """One of two ranks."""
    backend = trained(config_in(folder, publish="adapter"))
    save_file(
        {name: tensor.clone() for name, tensor in backend.local_tensors().items()},
        folder / f"{backend.rank}.safetensors",
    )
    backend.save(folder / "saved_by_two")
    backend.export_hf(folder / "exported_by_two")
    says = {
        "said": backend.policy.predict(BATCH).tolist(),
        "base": backend.models["reference"].predict(BATCH).tolist(),
        "layout": to_wire(backend.layout()),
    }
    (folder / f"rank{backend.rank}.json").write_text(json.dumps(says))
    backend.close()
    end_rank()


def adapted(names: Mapping[str, Tensor]) -> set[str]:
    return {name for name in names if name.removesuffix(".weight").endswith(TARGETS)}


def test_adapted_matrices_move_and_nothing_else(tmp_path: Path) -> None:
    backend = FsdpBackend(config_in(tmp_path), ("reference",))
    plain = FsdpBackend(config_in(tmp_path, rank=0))
    start = copied_weights(backend)
    assert start.keys() == copied_weights(plain).keys()
    assert all(torch.equal(tensor, start[name]) for name, tensor in copied_weights(plain).items())
    live = backend.local_tensors()  # a publisher asks once
    for number in range(2):
        assert step(backend, number) > 0
    moved = {name for name, tensor in live.items() if not torch.equal(tensor, start[name])}
    assert moved == adapted(start)
    for name in moved:  # by a matrix of rank 2
        assert torch.linalg.matrix_rank(live[name] - start[name], atol=1e-6) == 2


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_what_is_published_says_what_the_learner_says(tmp_path: Path, dtype: str, apart: float) -> None:
    """Read by plain transformers, from an export."""
    backend = trained(config_in(tmp_path, dtype=dtype))
    backend.export_hf(tmp_path / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=getattr(torch, dtype))
    live = backend.local_tensors()
    assert all(torch.equal(parameter, live[name]) for name, parameter in model.named_parameters())
    assert_says_the_same(model, backend, apart)


def test_peft_puts_the_adapters_on_the_base(tmp_path: Path) -> None:
    base = tmp_path / "base"
    load_causal_lm(tiny_model(tmp_path / "model"), seed=4).save_pretrained(base)
    config = config_in(tmp_path)
    backend = trained(dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(base))))
    backend.export_hf(tmp_path / "final")
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logprobs_of(plain)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "final" / ADAPTER)
    assert_says_the_same(adapted, backend, 1e-5)
    assert (logprobs_of(adapted) - before).abs().max() > 0.001


def saved_by_peft(folder: Path, **settings: Any) -> Config:
    """Adapters with random A and B beside a random model."""
    base = folder / "base"
    load_causal_lm(tiny_model(folder / "model"), seed=4).save_pretrained(base)
    given = {"r": 2, "lora_alpha": 6, "target_modules": list(TARGETS), **settings}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**given))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "begun")
    config = config_in(folder)
    lora = dataclasses.replace(config.model.lora, path=str(folder / "begun"))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(base), lora=lora))


def test_a_policy_begins_with_adapters_of_peft_and_gives_them_back(tmp_path: Path) -> None:
    config = saved_by_peft(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    before = logprobs_of(base)
    of_peft = PeftModel.from_pretrained(base, tmp_path / "begun")
    backend = FsdpBackend(config, ("reference",))
    assert_says_the_same(of_peft, backend, 1e-5)
    assert (logprobs_of(of_peft) - before).abs().max() > 0.01
    backend.export_hf(tmp_path / "final")
    written, given = (
        load_file(at / "adapter_model.safetensors")
        for at in (tmp_path / "final" / ADAPTER, tmp_path / "begun")
    )
    assert written.keys() == given.keys()
    assert all(torch.equal(tensor, given[name]) for name, tensor in written.items())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"use_rslora": True}, "has use_rslora True"),
        ({"use_dora": True}, "has use_dora True"),
        ({"bias": "all"}, "has bias 'all'"),
        ({"r": 3}, "has r 3"),
        ({"lora_alpha": 5}, "has lora_alpha 5"),
        ({"target_modules": ["q_proj"]}, r"has target_modules \['q_proj'\]"),
        ({"layers_to_transform": [0]}, r"has layers_to_transform \[0\]"),
        (
            {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
            "has nothing at .*layers.0.self_attn.q_proj",
        ),
    ],
)
def test_adapters_of_another_kind_size_or_place_are_refused(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.lora.path = .*{why}"):
        FsdpBackend(saved_by_peft(tmp_path, **settings))


def test_what_is_no_folder_of_peft_is_refused(tmp_path: Path) -> None:
    config = saved_by_peft(tmp_path)
    (tmp_path / "begun" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"model.lora.path = .*cannot be read"):
        FsdpBackend(config)


def logprobs_of(model: torch.nn.Module) -> Tensor:
    """[n] of the first rollout of BATCH, prompt and all, but its first token."""
    ids = BATCH.token_ids_N[: BATCH.lengths_R[0]]
    with torch.no_grad():
        logp_NV = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return logp_NV[:-1].gather(1, ids[1:, None])[:, 0]


def assert_says_the_same(model: torch.nn.Module, backend: FsdpBackend, apart: float) -> None:
    said_N = backend.policy.predict(BATCH)[: BATCH.lengths_R[0]]
    here_N = BATCH.loss_mask_N[: BATCH.lengths_R[0]]
    torch.testing.assert_close(said_N[here_N], logprobs_of(model)[here_N[1:]], atol=apart, rtol=0)


def test_the_reference_is_the_base_and_takes_no_memory(tmp_path: Path) -> None:
    backend = FsdpBackend(config_in(tmp_path), ("reference",))
    reference, start = backend.models["reference"], backend.policy.predict(BATCH)
    for number in range(2):
        step(backend, number)
    assert torch.equal(reference.predict(BATCH), start)
    assert not torch.allclose(backend.policy.predict(BATCH), start, atol=1e-3)
    assert backend._models.keys() == {"policy"}
    with pytest.raises(TypeError, match="frozen"):
        reference.accumulate([], lambda *_: torch.zeros(()))


def test_a_checkpoint_holds_adapters_alone_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    backend, fresh = trained(config_in(tmp_path)), FsdpBackend(config_in(tmp_path), ("reference",))
    backend.save(tmp_path / "saved")
    kept = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata.keys()
    assert all(key == "rng" or key.endswith((".up", ".down")) for key in kept)
    fresh.load(tmp_path / "saved")
    for _ in range(2):
        assert all(
            torch.equal(tensor, copied_weights(backend)[name])
            for name, tensor in copied_weights(fresh).items()
        )
        step(backend, 3), step(fresh, 3)


def test_an_export_has_the_adapters_too_as_peft_names_them(tmp_path: Path) -> None:
    """A matrix and its adapter of the file make the merged one."""
    config = config_in(tmp_path)
    start = copied_weights(FsdpBackend(config))
    backend = trained(config)
    backend.export_hf(tmp_path / "final")
    said = json.loads((tmp_path / "final" / "adapter" / "adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", 2, 6.0)
    assert set(said["target_modules"]) == set(TARGETS)
    file = load_file(tmp_path / "final" / "adapter" / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    a, b = (file[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    assert len(file) == 2 * len(adapted(start))
    torch.testing.assert_close(
        backend.local_tensors()[f"{name}.weight"], start[f"{name}.weight"] + 6 / 2 * b @ a
    )


def test_two_ranks_have_the_adapters_of_one(tmp_path: Path) -> None:
    alone, merged = (trained(config_in(tmp_path, publish=how)) for how in ("adapter", "merged"))
    run_ranks("test_lora:rank_main", tmp_path)
    base = alone.models["reference"].predict(BATCH)
    for rank in range(2):
        says = json.loads((tmp_path / f"rank{rank}.json").read_text())
        torch.testing.assert_close(torch.tensor(says["said"]), alone.policy.predict(BATCH), atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(says["base"]), base, atol=1e-4, rtol=0)
        assert says["layout"].keys() == to_wire(alone.layout()).keys()
        for name, part in load_file(tmp_path / f"{rank}.safetensors").items():
            (box,) = from_wire(says["layout"])[name].boxes
            whole = alone.local_tensors()[name]
            torch.testing.assert_close(part, whole[box.slices()], atol=2e-5, rtol=0)
            assert part.numel() < whole.numel()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported_by_two")
    for name, tensor in exported.named_parameters():
        torch.testing.assert_close(tensor.detach(), merged.local_tensors()[name], atol=2e-5, rtol=0)
    fresh = FsdpBackend(config_in(tmp_path), ("reference",))
    fresh.load(tmp_path / "saved_by_two")
    torch.testing.assert_close(fresh.policy.predict(BATCH), alone.policy.predict(BATCH), atol=1e-4, rtol=0)


@pytest.mark.parametrize("target", ["lm_head", "qkv_proj"])
def test_a_target_that_is_not_there_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.lora.targets = \['{target}'\].*no such linear maps"):
        FsdpBackend(config_in(tmp_path, targets=("q_proj", target)))


def test_what_does_not_go_with_adapters_is_refused(tmp_path: Path) -> None:
    model: Any = config_in(tmp_path).model
    with pytest.raises(ConfigError, match=r"reference.update_every = 2"):
        small_config(tmp_path, model=model, reference=ReferenceConfig(update_every=2))
    alone = dataclasses.replace(model, lora=dataclasses.replace(model.lora, publish="adapter"))
    server = ServerConfig(urls=["http://127.0.0.1:1"], folder=str(tmp_path))
    with pytest.raises(ConfigError, match=r"generator.engine = 'sglang': takes whole weights"):
        small_config(tmp_path, model=alone, generator=GeneratorConfig(engine="sglang", server=server))
    for policy, reads in ((alone, ServerConfig(urls=server.urls)), (model, server)):
        with pytest.raises(
            ConfigError, match=r"generator.server.folder = .*: is where generator.engine=vllm_server"
        ):
            small_config(
                tmp_path, model=policy, generator=GeneratorConfig(engine="vllm_server", server=reads)
            )
    for wrong in ({"rank": -1}, {"alpha": 0.0}, {"targets": ()}):
        with pytest.raises(ConfigError, match=f"model.lora.{next(iter(wrong))} = "):
            Config(model=ModelConfig(lora=LoraConfig(**wrong)))  # type: ignore[arg-type]
