"""Commands that need no other process, from their words to what they print and leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.bench import climb


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = cli.main(words)
    printed = capsys.readouterr().out
    assert code == 0, printed
    return printed


def test_a_model_is_warmed_up_scored_and_asked(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, warm = str(config_file), str(tmp_path / "warm")
    steps = (
        "sft.steps=60",
        "sft.batch_size=32",
        "sft.optimizer.lr=1e-2",
        "sft.every=30",
        f"sft.output={warm}",
    )
    run(capsys, "sft", config, *steps)
    scored = json.loads(run(capsys, "eval", config, "--model", warm))
    assert scored["tasks"] == 20
    assert 0 <= scored["accuracy"] <= 1
    answers = run(
        capsys, "generate", config, "--model", warm, "--prompt", "4+5=", "--prompt", "1+2="
    ).splitlines()
    assert len(answers) == 2
    assert any(
        ">" in answer for answer in answers
    )  # every target has a carry behind one, which the warm-up teaches


def test_the_plan_of_the_weight_stream_is_shown(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--learner", "fsdp 4 tp 2", "--generators", "3 tp 2")
    printed = run(capsys, "sync", "plan", str(config_file), *shape)
    assert "8 ranks, each holds" in printed
    assert "8 ranks" not in run(capsys, "sync", "plan", str(config_file))


def test_a_bench_prints_its_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(climb.TOY, "run", {"versions": 2})
    printed = run(capsys, "bench", "climb", "grpo")
    assert "grpo" in printed
    assert "optimum" in printed
