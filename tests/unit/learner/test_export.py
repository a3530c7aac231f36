"""A checkpoint of a run becomes the model that final/ would have been, whoever saved it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from learner_cases import random_group, small_config
from safetensors.torch import load_file
from trainer_cases import Case, FakeQueue, checkpoints_of
from transformers import AutoModelForCausalLM

from asyncrl import evaluate
from asyncrl.config.load import save_config
from asyncrl.config.schema import CheckpointConfig, Config, LearnerConfig, RunConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.config.sections.models import LoraConfig
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.checkpoint import Meta
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.export import export


def config_of(folder: Path, name: str, versions: int) -> Config:
    run = RunConfig(name=name, dir=str(folder), versions=versions)
    return small_config(folder, run=run, checkpoint=CheckpointConfig(every=1, keep=9))


def weights(folder: Path) -> dict[str, list[float]]:
    (file,) = folder.glob("*.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in load_file(file).items()}


def stopped_run(folder: Path) -> tuple[Config, Path]:
    """At version 4, with checkpoints of 1, 2, 3, 4 and no final/."""
    config = config_of(folder, "stopped", versions=9)
    case = Case(config, FakeQueue())
    case.queue.on_claim = lambda step, index: case.stop.set() if (step, index) == (3, 1) else None
    with pytest.raises(StoppedError):
        case.trainer.run()
    assert not (case.folder / "final").exists()
    return config, case.folder


def test_an_export_of_a_stopped_run_is_what_final_of_that_version_is(tmp_path: Path) -> None:
    whole = Case(config_of(tmp_path, "whole", versions=2), FakeQueue())
    whole.trainer.run()
    config, run = stopped_run(tmp_path)
    assert export(config, run, tmp_path / "second", version=2) == 2
    assert weights(tmp_path / "second") == weights(whole.folder / "final")
    assert export(config, run, tmp_path / "newest") == 4
    assert weights(tmp_path / "newest") != weights(whole.folder / "final")
    AutoModelForCausalLM.from_pretrained(tmp_path / "newest")
    with pytest.raises(ConfigError, match=r"DIR = .*holds something already"):
        export(config, run, tmp_path / "newest")
    with pytest.raises(ConfigError, match=r"version = 7: .* it has: 1, 2, 3, 4"):
        export(config, run, tmp_path / "seventh", version=7)
    with pytest.raises(ConfigError, match=r"asyncrl export .*stopped --version 2 DIR"):
        evaluate.generate(config, str(run / "checkpoints" / "v000002"), ["1+1="])


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_in_half_precision_and_adapters_too(tmp_path: Path, rank: int) -> None:
    """As the learner itself would have exported them: the parameters, not their float32 masters."""
    learner = LearnerConfig(activation_checkpointing="layers", optimizer=OptimizerConfig(lr=1e-2))
    config = config_of(tmp_path, "half", versions=1)
    model = dataclasses.replace(config.model, dtype="bfloat16", lora=LoraConfig(rank=rank))
    config = dataclasses.replace(config, model=model, learner=learner)
    Case(config, FakeQueue())  # makes the model
    backend = FsdpBackend(config)
    backend.policy.accumulate(
        [MicroBatch.of([random_group(0)])], lambda batch, logp_N, entropy_N: -logp_N.sum()
    )
    backend.policy.optimizer_step(1.0, lr=1e-2)
    saver = checkpoints_of(tmp_path / "half", backend)
    saver.begin(Meta(1, b"", None))
    assert saver.finish() == 1
    backend.export_hf(tmp_path / "its_own")
    export(config, tmp_path / "half", tmp_path / "exported")
    assert weights(tmp_path / "exported") == weights(tmp_path / "its_own")
    assert (tmp_path / "exported" / "adapter").exists() == (rank > 0)
    if rank:
        assert weights(tmp_path / "exported" / "adapter") == weights(tmp_path / "its_own" / "adapter")
    other = dataclasses.replace(
        config, model=dataclasses.replace(model, lora=LoraConfig(rank=2 if not rank else 0))
    )
    with pytest.raises(ConfigError, match=r"has no policy\..*: it was made with another model\.lora"):
        export(other, tmp_path / "half", tmp_path / "other")


def test_the_command_finds_run_and_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from asyncrl import cli

    config, run = stopped_run(tmp_path)
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 2
    assert "holds no config.yaml" in capsys.readouterr().err
    config = dataclasses.replace(
        config,
        tasks=dataclasses.replace(config.tasks, source="a:b"),
        reward=dataclasses.replace(config.reward, function="a:b"),
    )
    save_config(config, run / "config.yaml")
    assert cli.main(["export", str(run), "--version", "1", str(tmp_path / "out")]) == 0
    assert "the policy of version 1" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").exists()
