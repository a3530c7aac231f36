"""How vLLM is started on GPUs, seen from a process without one: torch, NVML and vLLM are stand-ins."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from learner_cases import tiny_model

from asyncrl.config.rules import check_section
from asyncrl.config.schema import Config, GeneratorConfig, ModelConfig, RewardConfig
from asyncrl.config.sections.generator import VllmConfig
from asyncrl.config.sections.models import LoraConfig
from asyncrl.device import accelerator
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.vllm import vllm_start
from asyncrl.generator.engines.vllm.vllm_weights import rank_in_generator
from asyncrl.generator.process import run_generator
from asyncrl.models.loading import load_causal_lm
from asyncrl.tasks.addition import write_model_folder


class StartedError(Exception):
    """vLLM would begin to start processes."""


def sees_a_gpu(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """As a build of torch for CUDA, where NVML counts one GPU and nothing has started the driver."""

    def driver(*_: Any) -> int:
        events.append("the driver starts")
        return 1

    for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getDevice", "_cuda_setDevice"):
        monkeypatch.setattr(torch._C, name, driver, raising=False)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1)
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceIndex", driver)
    assert accelerator.count() == 1


def stands_in_for_vllm(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    class Arguments:
        def __init__(self, **arguments: Any) -> None: ...

        def create_engine_config(self) -> None:
            events.append(f"vLLM starts, and will {os.environ[vllm_start.METHOD]}")
            raise StartedError

    for name in ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.engine.arg_utils"].AsyncEngineArgs = Arguments  # type: ignore[attr-defined]
    async_llm = ModuleType("vllm.v1.engine.async_llm")
    async_llm.AsyncLLM = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, async_llm.__name__, async_llm)
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(get_device_total_memory=lambda: 80 << 30)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, platforms.__name__, platforms)
    monkeypatch.setattr(vllm_start, "check_vllm", lambda: None)
    monkeypatch.setattr("asyncrl.generator.engines.vllm.vllm_engine.check_vllm", lambda: None)


@pytest.mark.parametrize("method", [None, "fork"])
def test_a_generator_starts_no_driver_before_vllm_which_spawns(
    method: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_model_folder(tmp_path, hidden_size=32, layers=1)
    events: list[str] = []
    variables = {name: value for name, value in os.environ.items() if name != vllm_start.METHOD}
    monkeypatch.setattr(
        os, "environ", variables if method is None else {**variables, vllm_start.METHOD: method}
    )
    sees_a_gpu(monkeypatch, events)
    stands_in_for_vllm(monkeypatch, events)
    reward = RewardConfig(function="asyncrl.tasks.addition:reward")
    model, generator = ModelConfig(path=str(tmp_path)), GeneratorConfig(engine="vllm")
    config = Config(model=model, reward=reward, generator=generator)
    with pytest.raises(StartedError):
        asyncio.run(run_generator(config, name="generator-0"))
    assert events == ["vLLM starts, and will spawn"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("data_parallel_size", 2, "set generator.vllm.data_parallel"),
        ("data_parallel_backend", "ray", "vLLM balances them"),
        ("enable_sleep_mode", True, "placement.colocate=true sets it"),
        ("quantization", "fp8", "set generator.quantization"),
        ("pipeline_parallel_size", 2, "never tried"),
        ("enable_expert_parallel", True, "never tried"),
        ("cpu_offload_gb", 4, "never tried"),
        ("tensor_parallel_size", 2, "set generator.vllm.tensor_parallel"),
    ],
)
def test_arguments_that_are_refused_by_name(name: str, value: object, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"vllm\.extra\.{name}(.|\n)*{why}"):
        check_section(VllmConfig(extra={name: value}), "vllm")


def test_arguments_that_asyncrl_does_not_know_go_to_vllm(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    ours = VllmConfig(data_parallel=2, kv_cache_mb=1, extra={"block_size": 64})
    check_section(ours, "vllm")
    generator = GeneratorConfig(engine="vllm", slots=9, vllm=ours)
    arguments = vllm_start.engine_arguments(
        Config(model=ModelConfig(path=str(tmp_path)), generator=generator)
    )
    assert arguments["block_size"] == 64
    assert (arguments["data_parallel_size"], arguments["max_num_seqs"]) == (2, 5)


def test_speculative_decoding_of_vllm_is_refused_on_a_cpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model_folder(tmp_path)
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    ours = VllmConfig(extra={"speculative_config": drafts})
    config = Config(
        model=ModelConfig(path=str(tmp_path)), generator=GeneratorConfig(engine="vllm", vllm=ours)
    )
    with pytest.raises(ConfigError, match=r"speculative_config = .*generator\.speculation\.tokens"):
        vllm_start.engine_arguments(config)
    monkeypatch.setattr(vllm_start.accelerator, "count", lambda: 1)
    assert vllm_start.engine_arguments(config)["speculative_config"] == drafts


def test_replicas_that_share_experts_are_refused() -> None:
    two = Config(model=ModelConfig(path="x"), generator=GeneratorConfig(vllm=VllmConfig(data_parallel=2)))
    vllm_start.check_replicas(two, has_experts=False)
    vllm_start.check_replicas(Config(model=ModelConfig(path="x")), has_experts=True)
    with pytest.raises(ConfigError, match="models without experts"):
        vllm_start.check_replicas(two, has_experts=True)


def test_adapters_have_frozen_weights_and_one_slot_of_a_size_that_vllm_knows(
    tmp_path: Path,
) -> None:
    plain = tiny_model(tmp_path / "model")

    def arguments(rank: int) -> dict[str, Any]:
        lora = LoraConfig(rank=rank, targets=("q_proj",))
        config = Config(model=replace(plain, lora=lora), generator=GeneratorConfig(engine="vllm"))
        with pytest.raises(ConfigError, match=r"model.lora.publish = 'adapter': .* with experts"):
            vllm_start.check_experts_beside_adapters(config, has_experts=True)
        vllm_start.check_experts_beside_adapters(config, has_experts=False)
        return vllm_start.engine_arguments(config)

    with pytest.raises(ConfigError, match=r"model.path = .* has no weights"):
        arguments(9)
    load_causal_lm(plain, seed=0).save_pretrained(plain.path)
    made = arguments(9)
    assert (made["load_format"], made["max_lora_rank"], made["max_loras"]) == ("auto", 16, 1)
    assert made["lora_target_modules"] == ["q_proj"]
    with pytest.raises(ConfigError, match=r"model.lora.rank = 513"):
        arguments(513)


def test_the_ranks_of_all_replicas_are_numbered_through() -> None:
    every = [
        SimpleNamespace(data_parallel_index=replica, world_size=2, rank=rank)
        for replica in (0, 1)
        for rank in (0, 1)
    ]
    assert [rank_in_generator(of) for of in every] == [0, 1, 2, 3]
    assert rank_in_generator(every[1], of_server=True) == 1
    with pytest.raises(RuntimeError, match="its first replica alone"):
        rank_in_generator(every[2], of_server=True)


@pytest.mark.parametrize("devices", [0, 1])
def test_vllm_is_given_the_memory_of_the_accelerator_without_its_driver(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = SimpleNamespace(get_device_total_memory=lambda: 80 << 30)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setattr(vllm_start.accelerator, "count", lambda: devices)
    assert vllm_start._device_bytes() == (80 << 30 if devices else None)
