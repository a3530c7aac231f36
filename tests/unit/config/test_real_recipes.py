"""The recipes for GPUs: each is valid, says what it is, fits the shapes of its model, and has the predicted update."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from recipes_page import table
from tiny_recipes import BIG, planned_model

from asyncrl.cli import main
from asyncrl.config.load import CONFIGS, load_config
from asyncrl.config.recipes import read_head, recipe_heads
from asyncrl.config.schema import Config
from asyncrl.launch.preflight import check_axes, off_keys
from asyncrl.launch.sync_plan import print_plan

WORDS = {"source", "hardware", "duration", "result", "layout", "sync", "command", "ours"}
SLOW = {"large/deepseek_671b.yaml", "large/kimi_k2_lora.yaml"}
"""Their plans take more than ten seconds."""

EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in BIG]


def config_of(name: str) -> Config:
    """With the shapes in the place of the model, which is on the hub."""
    config = load_config(BIG[name].path)
    model = dataclasses.replace(config.model, path=str(planned_model(BIG[name])))
    return dataclasses.replace(config, model=model)


@pytest.mark.parametrize("name", BIG)
def test_a_recipe_is_valid_and_says_what_it_is(name: str) -> None:
    head = BIG[name]
    assert WORDS - head.says.keys() == set()
    assert not any("?" in text for text in head.says.values()), "a gap"
    named = f"configs/recipes/{name}"
    assert named in head.says["sync"]
    assert named in head.says["command"] or "docs/launching.md" in head.says["command"]
    assert off_keys(load_config(head.path)) == [], "keys that do nothing"


@pytest.mark.parametrize("name", BIG)
def test_a_recipe_fits_the_shapes_of_its_model(name: str) -> None:
    config = config_of(name)
    check_axes(config)
    named = config.generator.devices, config.learner.devices
    for devices, needed in zip(named, (config.generator.count, config.learner.processes), strict=True):
        assert devices is None or len(devices.split(",")) == needed


@pytest.mark.parametrize("name", EACH)
def test_the_update_of_the_weights_takes_as_long_as_the_head_has_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds, _, command = BIG[name].says["sync"].partition(" s, predicted by: ")
    words = shlex.split(command)
    assert words[:3] == ["asyncrl", "sync", "plan"]
    print_plan(load_config(CONFIGS.parent / words[3]), str(planned_model(BIG[name])), None, None)
    predicted = re.search(r"([\d.]+) s the last", capsys.readouterr().out)
    assert predicted is not None
    assert seconds == predicted[1]


def test_asyncrl_recipes_lists_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    for head in recipe_heads():
        assert (
            f"{head.path.relative_to(CONFIGS.parent)}\n    {head.about}\n    {head.says['hardware']}\n" in out
        )


def test_further_lines_belong_to_the_word_above_them(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "# It trains.\n#\n#   ours       one,\n#              two\n#   not yet    three\n#\n# Free.\nrun: {}\n"
    )
    head = read_head(path)
    assert (head.about, head.says) == ("It trains.", {"ours": "one, two", "not yet": "three"})


def test_the_page_has_the_recipes_of_today() -> None:
    page = (CONFIGS.parent / "docs" / "recipes.md").read_text("utf-8")
    assert table() in page, "run python tests/helpers/docs/recipes_page.py"
