"""The recipe `pictures`, shortened: warm-up, a run that trains the tower, one that goes on from its checkpoint, and the
score of what it exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import ran, rows, summary_of
from safetensors.torch import load_file

from asyncrl import evaluate
from asyncrl.config.load import CONFIGS, load_config
from asyncrl.offline.process import train_supervised
from asyncrl.tasks.pictures import write_model_folder

RECIPE = CONFIGS / "recipes" / "pictures.yaml"


@pytest.mark.slow
def test_pictures_are_trained_on_and_the_run_goes_on(tmp_path: Path) -> None:
    warm, run = tmp_path / "warm", tmp_path / "demo-pictures"
    write_model_folder(tmp_path / "model")
    words = ["sft.steps=40", "sft.every=40", "evaluation.options.count=20", f"sft.output={warm}"]
    words += [f"run.dir={tmp_path}"]
    train_supervised(load_config(RECIPE, [*words, f"model.path={tmp_path / 'model'}"]))
    words += [
        f"model.path={warm}",
        "batch.groups=4",
        "checkpoint.every=2",
        "evaluation.every=2",
    ]
    ran("asyncrl", "train", str(RECIPE), *words, "run.versions=3")
    ran("asyncrl", "train", str(RECIPE), *words, "run.versions=5", "run.resume=true")
    told = rows(run)
    assert [row["version"] for row in told] == [1, 2, 3, 4, 5]
    assert any(row["train/grad_norm"] > 0 for row in told)
    gaps = [row["train/logprob_gap/probe/max"] for row in told if row["train/logprob_gap/probe/tokens"]]
    assert max(gaps) < 1e-3
    before, after = (load_file(next(folder.glob("*.safetensors"))) for folder in (warm, run / "final"))
    tower = [name for name in before if "visual" in name]
    assert any(not torch.equal(before[name], after[name]) for name in tower)
    assert evaluate.evaluate(load_config(RECIPE, words), str(run / "final"))["tasks"] == 20
    assert "<|image_pad|>" in (run / "rollouts.jsonl").read_text()
    summary = summary_of(run)
    assert (summary["groups_trained"], summary["heldout_accuracy_end"] is None) == (20, False)
