"""Supervised training as commands: ranks, kills, stops, and what they leave."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest
import torch
from learner_cases import same
from metrics_page import unlisted
from processes import (
    Process,
    final_weights,
    finished,
    newest_checkpoint,
    ran,
    rows,
    started,
    succeeded,
    summary_of,
    until,
    until_trained,
)
from rich.console import Console

from asyncrl.launch.views.findings import diagnosis_text
from asyncrl.launch.views.top import TopScreen
from asyncrl.observability.dash.page_data import PageData
from asyncrl.observability.run_files import RunFiles
from asyncrl.telemetry.sinks import read_rows

CONFIG = """
run: {{name: it, dir: {folder}, seed: 3}}
model: {{path: {model}}}
tasks: {{source: asyncrl.tasks.addition:train, options: {{digits: 1, held_out: 20}}}}
learner: {{threads: 1, micro_batch_tokens: 64}}
sft: {{steps: 150, batch_size: 6, every: 75, optimizer: {{lr: 1e-2, schedule: cosine}}}}
checkpoint: {{every: 2}}
launch: {{quiet: true}}
"""
HELD_OUT = ["evaluation.source=asyncrl.tasks.addition:heldout", "evaluation.options={digits: 1, size: 20}"]
REWARD = [
    "reward.function=asyncrl.tasks.addition:reward",
    "generator.max_tokens=8",
    "generator.max_length=16",
]
SHORT = ["sft.steps=6", "sft.every=3", "checkpoint.every=100"]


@pytest.fixture
def config(tmp_path: Path, model_folder: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, model=model_folder))
    return path


def sft(config: Path, name: str, *words: str) -> Path:
    """Run to the end. Returns the folder of the run."""
    ran("asyncrl", "sft", str(config), f"run.name={name}", *words)
    return config.parent / f"{name}-sft"


def losses(run: Path) -> list[float]:
    return [row["train/loss"] for row in rows(run)]


def scores(run: Path) -> list[dict[str, float]]:
    return [row for row in read_rows(run / "metrics.jsonl") if "eval/loss" in row]


def kill(process: Process) -> int:
    process.kill()
    return process.wait()


def stop(process: Process) -> int:
    process.send_signal(signal.SIGTERM)
    return finished(process)[0]


@pytest.mark.slow
def test_a_run_that_is_killed_and_then_stopped_ends_with_equal_weights(config: Path) -> None:
    """The same steps, on the same rows, at the same learning rates."""
    whole, run = sft(config, "whole"), config.parent / "it-sft"
    for resume, end, code in (("false", kill, -9), ("true", stop, 10)):
        done = max(newest_checkpoint(run), 0)
        with started("asyncrl", "sft", str(config), f"run.resume={resume}") as process:
            until(lambda after=done: newest_checkpoint(run) > after, "checkpoint", process)
            assert end(process) == code
        assert not (run / "final").exists()
    assert newest_checkpoint(run) == rows(run)[-1]["version"], "a stop saves the last step"
    sft(config, "it", "run.resume=true")
    assert same(final_weights(whole), final_weights(run))
    assert losses(run) == losses(whole)
    assert losses(run)[-1] < losses(run)[0] / 2
    assert summary_of(run)["versions"] == 150


def test_two_ranks_train_as_one_and_are_stopped_together(config: Path) -> None:
    """On parts of the same batches; and they answer held-out tasks with the weights of both."""
    words = [*SHORT, *HELD_OUT, *REWARD, "learner.micro_batch_tokens=4096"]
    alone, both = sft(config, "one", *words), sft(config, "two", *words, "learner.processes=2")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-4)
    for one, two in zip(scores(alone), scores(both), strict=True):
        assert two["eval/loss"] == pytest.approx(one["eval/loss"], rel=1e-4)
        assert two["eval/accuracy"] == one["eval/accuracy"]
    weights = final_weights(both)
    for name, tensor in final_weights(alone).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)
    run = config.parent / "stopped-sft"
    with started("asyncrl", "sft", str(config), "run.name=stopped", "learner.processes=2") as process:
        until_trained(run, 3, process)
        assert stop(process) == 10
    assert newest_checkpoint(run) == rows(run)[-1]["version"]


def test_adapters_are_trained_alone_and_written_beside_the_merged_model(config: Path) -> None:
    run = sft(config, "small", *SHORT, "model.lora.rank=4", *HELD_OUT)
    adapter = run / "final/adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
    assert (adapter / "adapter_model.safetensors").is_file()
    found = scores(run)
    assert found[-1]["eval/loss"] < found[0]["eval/loss"]
    again = sft(
        config,
        "again",
        *SHORT,
        "model.lora.rank=4",
        f"model.lora.path={adapter}",
        "model.path="
        + str(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]),
    )
    assert losses(again)[0] < losses(run)[0]


def test_the_commands_that_look_at_runs_know_this_one(config: Path) -> None:
    run = sft(config, "seen", *SHORT, *HELD_OUT)
    assert unlisted({key for row in read_rows(run / "metrics.jsonl") for key in row}) == []
    files = RunFiles(run)
    files.read()
    assert files.run_state() == "done"
    assert "version 6 of 6" in diagnosis_text(files, 100)
    screen = TopScreen(run)
    screen.read()
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(screen.drawn(120))
    assert "held-out loss" in console.export_text()
    page = PageData(run)
    page.read()
    page.find(logs=False)
    assert page.state()["folder"]


def test_rows_of_conversations_are_named_where_they_are_wrong(config: Path) -> None:
    """Before a run folder is made."""
    path = config.parent / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "target": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    rows_of = [f"tasks.source={path}", "tasks.options=null"]
    with started("asyncrl", "sft", str(config), *rows_of) as process:
        code, printed = finished(process)
    assert code == 2
    assert f"{path}:2: has no 'target' text" in printed
    assert not (config.parent / "it-sft").exists()
    path.write_text('{"prompt": "1+1=", "target": "2"}\n' * 3)
    with started("asyncrl", "sft", str(config), *rows_of, "sft.epochs=2", "sft.steps=null") as process:
        succeeded(process)
    assert len(losses(config.parent / "it-sft")) == 1, "two epochs of three rows are one batch of six"
