"""The recipes for GPUs on tiny shapes: each file, with another model and local rows, trains two versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_rows import write_hub
from missing import skip_without_sandbox
from processes import rows
from tiny_recipes import BIG, planned_model, words_of, write_tiny

from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train
from asyncrl.launch.preflight import preflight

pytestmark = pytest.mark.slow

SANDBOXED = {"agents/code_14b.yaml", "agents/retool_32b.yaml"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "hub"
    write_hub(folder)
    return folder


def own_files(name: str, folder: Path) -> list[str]:
    """The words for files that a recipe wants to be there before."""
    if name == "agents/search_3b.yaml":
        passages = folder / "passages.jsonl"
        passages.write_text('{"contents": "The river is the Tessin."}\n{"contents": "The hill is high."}\n')
        return [f"agent.options.documents={passages}"]
    if name == "agents/alfworld_1_5b.yaml":
        textworld = pytest.importorskip("textworld")
        options = textworld.GameOptions()
        options.seeds, options.path = 7, str(folder / "game.z8")
        game = textworld.generator.compile_game(textworld.generator.make_game(options), options)
        games = folder / "games.jsonl"
        games.write_text("".join(json.dumps({"prompt": f"Play {n}.", "game": game}) + "\n" for n in range(2)))
        return [f"{section}.source={games}" for section in ("tasks", "evaluation")]
    return []


@pytest.mark.parametrize("name", BIG)
def test_a_recipe_trains_two_versions_of_a_tiny_model(
    name: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in SANDBOXED:
        skip_without_sandbox()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(hub.parent / "cache"))
    kind = json.loads((planned_model(BIG[name]) / "config.json").read_text())["model_type"]
    write_tiny(kind, tmp_path / "model")
    recipe = load_config(BIG[name].path)
    words = [*words_of(recipe, tmp_path / "model", hub), f"run.dir={tmp_path}", *own_files(name, tmp_path)]
    config = load_config(BIG[name].path, words)
    preflight(config)
    summary = train(config)
    groups = 2 * config.batch.groups * config.batch.group_size
    assert (summary["versions"], summary["rollouts_trained"]) == (2, groups)
    told = rows(tmp_path / "tiny")
    assert all(row["train/grad_norm"] > 0 for row in told), "nothing was learned"
    for own in config.evaluation.named_sets:
        assert (f"{own}/accuracy" if own else "accuracy") in summary["heldout"]
