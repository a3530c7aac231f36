"""What `asyncrl algorithms` says is complete, and the page in docs/ says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.bench.climb import presets
from asyncrl.cli import main
from asyncrl.learner.algorithms.catalogue import KINDS, as_markdown, rows

PAGE = Path(__file__).parents[4] / "docs" / "algorithms.md"


@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_says_what_it_is(kind: str) -> None:
    for row in rows(kind):
        assert len(row.definition) > 10, row.name
        assert row.source or row.name == "none"


def test_keys_are_read_from_the_function_and_what_it_hands_its_config_to() -> None:
    keys = {row.name: set(row.keys) for kind in KINDS for row in rows(kind)}
    assert {"algorithm.gamma", "algorithm.lam"} <= keys["gae"]
    assert {"algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip"} <= keys["decoupled_ppo"]
    assert keys["tis"] == {"algorithm.correction.high"}


def test_the_page_is_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Else: replace its reference part by what `asyncrl algorithms --markdown` prints."""
    assert as_markdown().strip() in PAGE.read_text("utf-8")
    assert main(["algorithms", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == as_markdown().strip()
    assert main(["algorithms"]) == 0
    assert "  vapo " in capsys.readouterr().out


def test_the_page_tells_how_each_preset_climbed() -> None:
    page = PAGE.read_text("utf-8")
    assert all(f"| `{preset}` |" in page for preset in presets())
