from __future__ import annotations

from pathlib import Path

from asyncrl.config.keys_page import markdown
from asyncrl.config.load import all_keys

PAGE = Path(__file__).parents[3] / "docs" / "keys.md"


def test_the_page_of_all_keys_is_made_from_the_schema() -> None:
    assert PAGE.read_text("utf-8") == markdown(), "python -m asyncrl.config.keys_page > docs/keys.md"


def test_every_key_has_a_row() -> None:
    page = markdown()
    assert all(f"\n| `{key}` | " in page for key in all_keys())
