"""The table of `asyncrl config`: each pool with its ranks, its devices and the memory of a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learner_cases import tiny_model
from rich.console import Console

from asyncrl.cli import main
from asyncrl.config.schema import Config, ModelConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, KlLossConfig
from asyncrl.config.sections.generator import GeneratorConfig, ServerConfig, VllmConfig
from asyncrl.config.sections.learner import LearnerConfig
from asyncrl.config.sections.models import LoraConfig, ReferenceConfig
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig
from asyncrl.launch.memory import PlacedPool, placed_pools, placement_table
from asyncrl.models.loading import checkpoint_shapes
from asyncrl.sync.layout.layout import layout_bytes, whole_layout
from asyncrl.sync.tensors.budget import MemoryPart
from asyncrl.tasks.addition import write_model_folder

KL = AlgorithmConfig(advantage="gae", kl_loss=KlLossConfig(coef=0.1))


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return tiny_model(tmp_path / "model")


def pools(model: ModelConfig, **sections: Any) -> dict[str, PlacedPool]:
    config = Config(model=model, algorithm=KL, **sections)
    return {pool.name: pool for pool in placed_pools(config)}


def part(pool: PlacedPool, name: str) -> int | None:
    return next((part.bytes for part in pool.memory if part.name == name), None)


def test_each_pool_has_its_ranks_devices_and_models(model: ModelConfig) -> None:
    """In float32, a critic beside the policy: 4 bytes a parameter, and 16 of training."""
    reference = PlaceConfig(where="pool", processes=2, ranks=2, devices="4,5,6,7")
    found = pools(
        model,
        learner=LearnerConfig(devices="0"),
        generator=GeneratorConfig(
            engine="vllm", count=3, devices="1,2,3", vllm=VllmConfig(tensor_parallel=1)
        ),
        placement=PlacementConfig(
            reference=reference,
            generators={"wide": {"count": 1, "devices": "8,9", "vllm": {"tensor_parallel": 2}}},
        ),
    )
    shown = {name: (pool.ranks, pool.devices) for name, pool in found.items()}
    assert shown == {
        "learner": ("1", "0"),
        "generator": ("3", "1,2,3"),
        "placement.generators.wide": ("1 × 2", "8,9"),
        "placement.reference": ("2 × 2", "4,5,6,7"),
    }
    shapes, _ = checkpoint_shapes(model)
    whole = layout_bytes(whole_layout(shapes))
    assert part(found["learner"], "weights") == whole
    assert part(found["learner"], "critic") == whole + 16 * whole // 4
    assert part(found["learner"], "reference") is None, "it is on a pool"
    of_two = part(found["placement.reference"], "reference")
    assert of_two is not None
    assert whole / 2 <= of_two < whole * 0.6, "half of it, and of rows that do not divide one more"
    assert part(found["generator"], "weights") == whole


def test_a_reference_below_adapters_takes_no_memory(model: ModelConfig) -> None:
    lora = replace(model, lora=LoraConfig(rank=2, targets=("q_proj",)))
    (learner,) = (pool for name, pool in pools(lora).items() if name == "learner")
    assert part(learner, "reference") is None
    (learner,) = (
        pool
        for name, pool in pools(lora, reference=ReferenceConfig(path=model.path)).items()
        if name == "learner"
    )
    assert part(learner, "reference") == part(learner, "weights")


def test_engines_behind_http_have_memory_elsewhere(model: ModelConfig) -> None:
    generator = GeneratorConfig(engine="vllm_server", server=ServerConfig(urls=["http://127.0.0.1:1"]))
    assert pools(model, generator=generator)["generator"].memory == []


def test_the_table_names_the_largest_parts(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [MemoryPart(name, gb * 10**9) for name, gb in {"a": 1, "b": 4, "c": 0, "d": 2, "e": 3}.items()]
    shown = [PlacedPool("learner", "2 × 4", None, parts), PlacedPool("placement.rewards", "1", "", [])]
    Console(width=140).print(placement_table(shown))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "learner 2 × 4 as the shell has it 10 GB b 4 GB, e 3 GB, d 2 GB" in lines
    assert "placement.rewards 1 none unknown" in lines


def test_asyncrl_config_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model_folder(str(tmp_path / "adder"), hidden_size=32, layers=1)
    words = ["config", "configs/recipes/demo.yaml", f"model.path={tmp_path / 'adder'}"]
    assert main(words) == 0
    assert "Placement" in capsys.readouterr().out
    assert main([*words, "--rules-only"]) == 0
    assert "Placement" not in capsys.readouterr().out
