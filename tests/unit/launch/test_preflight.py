"""What is told before any process is started, from the command line and from a script alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import asyncrl
from asyncrl import cli
from asyncrl.config.load import load_config
from asyncrl.device import accelerator
from asyncrl.errors import ConfigError
from asyncrl.launch import local_run
from asyncrl.launch.preflight import preflight

GOOD = """\
run: {{dir: {folder}}}
model: {{path: {folder}/model}}
tasks: {{source: asyncrl.tasks.addition:train}}
reward: {{function: "asyncrl.tasks.addition:reward"}}
"""


@pytest.fixture
def config(tmp_path: Path, model_folder: Path) -> Path:
    shutil.copytree(model_folder, tmp_path / "model")
    path = tmp_path / "config.yaml"
    path.write_text(GOOD.format(folder=tmp_path))
    return path


BAD = [
    ("tasks.source=asyncrl.tasks.addition:nothing",),
    ("tasks.chat=true",),
    ("tasks.chat_template=nowhere.jinja",),
    ("evaluation.source=asyncrl.tasks.addition:nothing",),
    ("reward.function=asyncrl.tasks.addition:nothing",),
    ("reward.options={digits: 2}",),
    ("algorithm.own_loss=nowhere.py:loss",),
    ("generator.own_engine=nowhere.py:engine",),
    ("placement.generators.small.own_engine=nowhere.py:engine",),
    (
        "placement.generators.served.server.key_variable=NOT_SET",
        "placement.generators.served.server.urls=[http://127.0.0.1:1]",
        "placement.generators.served.engine=vllm_server",
    ),
    ("learner.own_backend=nowhere.py:backend",),
    ("agent.program=true", "agent.tools=[os:getpid]"),
    ("agent.program=true", "agent.history=2"),
    ("agent.function=a.py:run", "agent.environment=a:B"),
    ('agent.program="sh -c \'x"',),
    ("agent.gateway.host=0.0.0.0", "agent.program=true", "agent.gateway.remote=true"),
    ("agent.gateway.host=10.0.0.1", "agent.program=true"),
    ("generator.slots=1",),
    ("placement.generators.small.slots=1",),
    ("reference.path=nowhere", "algorithm.kl_loss.coef=0.1"),
    ("critic.path=nowhere", "algorithm.advantage=gae"),
    ("teacher.path=nowhere", "algorithm.advantage=distill"),
    ("reference.update_every=2",),
    ("model.path=made/by/nobody",),
    ("model.path=~/made-by-nobody",),
    ("run.dir=/dev/null/runs",),
    ("tasks.source=gone.jsonl",),
    ("evaluation.source=gone.parquet",),
    ("learner.devices='63'",),
    ("reward.function=os:getpid",),
    ("algorithm.own_loss=os:getpid",),
    ("generator.own_engine=os:getpid",),
    ("learner.own_backend=os:getpid",),
    ("learner.parallel.tensor=8", "learner.processes=8"),  # of 4 heads
    ("learner.parallel.replicate=2", "learner.processes=2", "learner.backend=megatron"),
    ("learner.parallel.pipeline=3", "learner.processes=3", "learner.backend=megatron"),  # of 2 layers
]


@pytest.mark.parametrize("overrides", BAD, ids=[words[0].partition("=")[0] for words in BAD])
def test_what_would_stop_a_process_starts_none(
    config: Path,
    overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*words: object) -> None:
        raise AssertionError("the run was started")

    monkeypatch.setattr(local_run, "train", start)
    key = overrides[0].partition("=")[0]
    with pytest.raises(ConfigError) as refusal:
        asyncrl.train(config, overrides)
    assert refusal.value.key == key
    for command in ("train", "config"):
        assert cli.main([command, str(config), *overrides]) == 2
        assert f"ConfigError: {key} = " in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(config: Path) -> None:
    (config.parent / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^model\.path = .*has no config\.json"):
        preflight(load_config(config, [f"model.path={config.parent}/empty"]))
    (config.parent / "empty" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model\.path = .*cannot be read"):
        preflight(load_config(config, [f"model.path={config.parent}/empty"]))


def test_the_rules_can_be_checked_without_the_files(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(config), "model.path=made/by/nobody", "--rules-only"]) == 0
    assert "valid" in capsys.readouterr().out
    assert cli.main(["config", str(config), "sync.keep=5"]) == 0
    assert "sync.keep=5 does nothing: sync.backend=auto" in capsys.readouterr().err


def test_nccl_without_a_gpu_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators would wait for their first weights without end."""
    monkeypatch.setattr(accelerator, "count", lambda: 0)
    with pytest.raises(ConfigError, match=r"^sync\.backend = 'nccl': .* torch sees none here"):
        preflight(load_config(config, ["sync.backend=nccl"]))
    monkeypatch.setattr(accelerator, "count", lambda: 1)
    preflight(load_config(config, ["sync.backend=nccl"]))


def test_a_model_without_what_is_quantized_is_refused(config: Path) -> None:
    (config.parent / "model" / "config.json").write_text(
        '{"model_type": "gpt2", "vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}'
    )
    with pytest.raises(ConfigError, match="finds no projections"):
        preflight(load_config(config, ["generator.quantization=int8"]))


def test_a_good_configuration_passes(config: Path) -> None:
    preflight(load_config(config))
    beside = config.parent / "model"
    preflight(load_config(config, ["algorithm.advantage=distill", f"teacher.path={beside}/../model"]))
