from __future__ import annotations

from pathlib import Path

from asyncrl.config.json_schema import schema
from asyncrl.config.keys_page import markdown
from asyncrl.config.load import all_keys
from asyncrl.config.schema import Config

PAGE = Path(__file__).parents[3] / "docs" / "keys.md"


def test_the_page_of_all_keys_is_made_from_the_schema() -> None:
    assert PAGE.read_text("utf-8") == markdown(), "python -m asyncrl.config.keys_page > docs/keys.md"


def test_every_key_has_a_row() -> None:
    page = markdown()
    assert all(f"\n| `{key}` | " in page for key in all_keys())


def test_a_default_is_that_of_the_section_around_it() -> None:
    page, rate = markdown(), Config().critic.optimizer.lr
    assert rate != Config().learner.optimizer.lr
    assert f"\n| `critic.optimizer.lr` | a number > 0 | `{rate:.1e}` |" in page
    critic = schema()["properties"]["critic"]["properties"]["optimizer"]
    assert critic["properties"]["lr"]["default"] == rate
