"""`asyncrl algorithms` is complete, and the pages of docs/algorithms/ hold the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

import pytest

from asyncrl.bench.climb import EDGE, presets
from asyncrl.cli import main
from asyncrl.learner.algorithms.catalogue import KINDS, algorithm_rows, as_markdown

ROOT = Path(__file__).parents[4]
DOCS = ROOT / "docs"
CLIMB = ROOT / "bench" / "results" / "climb_cpu2_2026-11-21.json"
ROW = r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$"
PAGES = {
    "advantage": "advantages.md",
    "loss": "losses.md",
    "correction.kind": "corrections.md",
    "correction.reject": "corrections.md",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_says_what_it_is(kind: str) -> None:
    for row in algorithm_rows(kind):
        assert len(row.definition) > 10, row.name
        assert row.source or row.name == "none"


def test_keys_are_read_from_the_function_and_what_it_hands_its_config_to() -> None:
    keys = {row.name: set(row.keys) for kind in KINDS for row in algorithm_rows(kind)}
    assert {"algorithm.gamma", "algorithm.lam"} <= keys["gae"]
    assert {"algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip"} <= keys["decoupled_ppo"]
    assert keys["tis"] == {"algorithm.correction.high"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_a_family_has_its_part_of_the_catalogue(kind: str) -> None:
    """Else: replace that part by the one that `asyncrl algorithms --markdown` prints."""
    (part,) = (
        text for text in as_markdown().split("\n## ") if text.lstrip("# ").startswith(f"`algorithm.{kind}`")
    )
    assert part.strip() in (DOCS / "algorithms" / PAGES[kind]).read_text("utf-8")


def test_the_command_prints_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == as_markdown().strip()
    assert main(["algorithms"]) == 0
    assert "  vapo " in capsys.readouterr().out


def test_the_page_has_the_figures_of_the_run_in_which_each_preset_climbed() -> None:
    page = (DOCS / "algorithms.md").read_text("utf-8")
    table = {name: cells for name, *cells in re.findall(ROW, page, re.MULTILINE)}
    assert table.keys() == set(presets())
    measured = {run["preset"]: run for run in json.loads(CLIMB.read_text("utf-8"))}
    later = set(re.findall(r"`(\w+)`: \d+ November", page))
    for name in measured.keys() - later:
        rewards = measured[name]["rewards"]
        figures = [mean(rewards[:EDGE]), mean(rewards[-EDGE:]), measured[name]["best"]]
        assert table[name] == [*(f"{figure:.2f}" for figure in figures), str(len(rewards))], name
