"""README and pages: every link, path, key and command in them exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.cli import COMMANDS, parse
from asyncrl.config.load import FREE, all_keys, load_config, sections
from asyncrl.config.schema import Config

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TOP = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
MADE = ("runs/",)
"""Folders that exist only after a run."""

FILES = (".py", ".md", ".yaml", ".key", ".json", ".jsonl", ".toml")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """As GitHub derives them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith(("https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@each_page
def test_paths_exist(page: Path) -> None:
    """From the root of the repository, or from the package."""
    for path in re.findall(r"`([\w.-]+(?:/[\w.*-]+)+/?)`", page.read_text("utf-8")):
        if path.startswith(TOP) and not path.startswith(MADE):
            assert list(ROOT.glob(path.rstrip("/"))) or list((ROOT / "asyncrl").glob(path.rstrip("/"))), path


def keys_in(text: str) -> Iterator[str]:
    """Words such as `section.key` and `section.key=value` within backticks."""
    for word in " ".join(re.findall(r"`([^`\n]+)`", text)).split():
        match = re.match(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:=.*)?$", word)
        if match and match[1].partition(".")[0] in sections(Config) and not match[1].endswith(FILES):
            yield match[1]


@each_page
def test_keys_exist(page: Path) -> None:
    known = all_keys()
    for key in keys_in(page.read_text("utf-8")):
        assert key.startswith(FREE) or any(f"{one}.".startswith(f"{key}.") for one in known), key


def commands_in(text: str) -> Iterator[list[str]]:
    """The words after `asyncrl` of each line that runs it, without its comment."""
    text = text.replace("\\\n", " ")  # a line that goes on
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    indented = re.findall(r"^ {4}((?:asyncrl|torchrun) .*)$", text, re.MULTILINE)
    for line in [*indented, *re.findall(r"^(?:asyncrl|torchrun) .*$", fenced, re.MULTILINE)]:
        words = shlex.split(line, comments=True)
        if "asyncrl" in words:
            yield words[words.index("asyncrl") + 1 :]


@each_page
def test_commands_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the demo for CONFIG. Of `a | b` each word must be a command."""
    monkeypatch.chdir(ROOT)
    for words in commands_in(page.read_text("utf-8")):
        if "|" in words:
            assert set(words) - {"|"} <= set(COMMANDS), words
            continue
        arguments = parse(["configs/recipes/demo.yaml" if word == "CONFIG" else word for word in words])
        if COMMANDS[arguments.command].takes_config:
            load_config(arguments.config, arguments.overrides)
