"""The keys that docs/metrics.md lists, and those that docs/migrating.md names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "metrics.md"
SUMMARY, TRACES = "## summary.json", "## Traces"
METRICS = "## Read their metrics"


def unlisted(keys: Iterable[str]) -> list[str]:
    """Those of `keys` that belong to no family of the rows."""
    return sorted(key for key in keys if not _families().fullmatch(key))


def listed(prefix: str) -> set[str]:
    """The keys and families of the rows that begin with `prefix`."""
    return {name for name in _of_rows() if name.startswith(prefix)}


def summary_keys() -> set[str]:
    """The keys of summary.json."""
    return set(_names(PAGE.read_text("utf-8").partition(SUMMARY)[2].partition(TRACES)[0]))


def migrating_tables() -> dict[str, list[str]]:
    """{another trainer's metric: ours} of docs/migrating.md."""
    text = (DOCS / "migrating.md").read_text("utf-8").partition(METRICS)[2]
    cells = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    names = [[re.findall(r"`([^`]+)`", cell) for cell in pair] for pair in cells]
    return {theirs: ours for left, ours in names for theirs in left}


@cache
def _families() -> re.Pattern[str]:
    """`<…>` in a key stands for any name."""
    names = _of_rows()
    return re.compile("|".join(".+".join(map(re.escape, re.split(r"<[^>]+>", name))) for name in names))


def _of_rows() -> list[str]:
    return _names(PAGE.read_text("utf-8").partition(SUMMARY)[0])


def _names(text: str) -> list[str]:
    """Those in the first cells of its tables."""
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
