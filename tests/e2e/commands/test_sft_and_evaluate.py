"""Supervised warm-up, held-out score and answers, on the model of some thousand parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import evaluate
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.offline.process import train_supervised


def test_a_warmed_up_model_is_scored_and_answers(config_file: Path, tmp_path: Path) -> None:
    """Every target of this task begins with a digit and a comma-separated carry, which 60 steps are enough to learn."""
    output = tmp_path / "warm"
    config = load_config(
        config_file,
        [
            "sft.steps=60",
            "sft.batch_size=32",
            "sft.optimizer.lr=1e-2",
            "sft.every=30",
            f"sft.output={output}",
        ],
    )
    reached = train_supervised(config)
    assert reached["steps"] == 60
    scored = evaluate.evaluate(config, str(output))
    assert (scored["tasks"], scored["accuracy"]) == (20, pytest.approx(reached["accuracy"]))
    answers = evaluate.generate(config, str(output), ["4+5=", "1+2=", "9+9="])
    assert len(answers) == 3
    assert sum(">" in answer for answer in answers) >= 2


def test_an_accuracy_to_stop_at_needs_held_out_tasks(config_file: Path) -> None:
    config = load_config(config_file, ["sft.until_accuracy=0.5", "evaluation.source=null"])
    with pytest.raises(ConfigError, match=r"sft\.until_accuracy = 0\.5: needs held-out tasks"):
        train_supervised(config)
