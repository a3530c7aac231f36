"""The recipes of `asyncrl demo --recipe`, shortened: demonstrations, then versions that real processes train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from missing import skip_without_sandbox
from own_functions import LENGTH
from processes import rows
from safetensors.torch import load_file

from asyncrl import demo as demos
from asyncrl.launch.local_run import train
from asyncrl.offline.process import train_supervised

pytestmark = pytest.mark.slow

SHORTER = ["sft.steps=4", "sft.batch_size=16", "run.versions=2", "batch.groups=4", "evaluation.every=2"]
SHORTER += ["sft.until_accuracy=null", "evaluation.options.count=8"]
CASES = {"webshop": [LENGTH], "python": [LENGTH], "search": [LENGTH], "sokoban": []}
"""LENGTH: so few demonstrations earn nothing else."""


@pytest.mark.parametrize("name", CASES)
def test_a_shortened_recipe_trains(name: str, tmp_path: Path) -> None:
    if name == "python":
        skip_without_sandbox()
    words = [*SHORTER, *CASES[name]]
    demo = demos.demo(str(tmp_path), words, name)
    demo.recipe.write_model(demo.model, demo.config)
    warm_up = [f"model.path={demo.model}", f"sft.output={demo.warm}"]
    train_supervised(demos.demo(str(tmp_path), [*words, *warm_up], name).config)
    summary = train(demo.config)
    assert (summary["versions"], summary["rollouts_trained"]) == (2, 2 * 4 * 8)
    assert None not in (summary["heldout_accuracy_start"], summary["heldout_accuracy_end"])
    run = tmp_path / demo.recipe.own_name
    assert [row["rollout/reward/mean"] == 0 for row in rows(run)] == [False, False]
    (warm,), (final,) = (folder.glob("*.safetensors") for folder in (demo.warm, run / "final"))
    before, after = load_file(warm), load_file(final)
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
