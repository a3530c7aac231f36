"""Every link, path, key and command of README and the pages exists; `make check` builds the site with these checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from site_pages import PAGES, ROOT, faults

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
def test_paths_keys_and_commands_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert faults(page.read_text("utf-8")) == []


def test_faults_are_found() -> None:
    text = "`sync/nowhere.py` `sync/bytes` `asyncrl/api.py` `queue.max_stale=1` `queue.depth=9` `sync.delta=true`"
    path, key, value, command = faults(f"{text}\n\n    asyncrl fly\n")
    assert path == "there is no path sync/nowhere.py"
    assert key == "there is no key queue.max_stale"
    assert value.startswith("sync.delta = True: Invalid value")
    assert command.startswith("asyncrl fly is refused")


def test_names_of_the_code_are_looked_up() -> None:
    there = "`queue/feeder.py` ▸ `feed` `queue/ledger/ledger.py`\n▸ `Ledger.submit`"
    assert faults(there) == []
    assert faults("`queue/feeder.py` ▸ `Feeder.feed`") == ["there is no Feeder.feed in queue/feeder.py"]


def test_keys_of_other_projects_are_not_looked_up() -> None:
    table = "| verl 0.9.1 | asyncrl |\n|---|---|\n| `algorithm.adv_estimator` | `algorithm.advantag` |\n"
    assert faults(table) == ["there is no key algorithm.advantag"]
    assert faults(table.replace("advantag`", "advantage`")) == []


def texts(source: Path) -> Iterator[str]:
    """The string literals of a file; adjacent ones are one, and what an f-string inserts is left out."""
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else " … " for part in node.values)
            yield "".join(map(str, parts))


def test_the_errors_of_troubleshooting_are_those_of_the_code() -> None:
    code = "\n".join(text for source in (ROOT / "asyncrl").rglob("*.py") for text in texts(source))
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8").partition("## It runs, but badly")[0]
    listed = [
        re.findall(r"`([^`]+)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| `")
    ]
    assert len(listed) > 20
    of_the_system = {"No space left on device"}
    assert [
        part for parts in listed for part in parts if part not in code and part not in of_the_system
    ] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in PAGES)
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["strict"]
    # With --quiet a strict build passes whatever is wrong.
    assert "mkdocs build\n" in (ROOT / "Makefile").read_text("utf-8")
