"""The keys that docs/metrics.md lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
SUMMARY = "## summary.json"


def unlisted(keys: Iterable[str]) -> list[str]:
    """Those of `keys` that belong to no family of the rows."""
    return sorted(key for key in keys if not _families().fullmatch(key))


def listed(prefix: str) -> set[str]:
    """The keys and families of the rows that begin with `prefix`."""
    return {name for name in _of_rows() if name.startswith(prefix)}


def summary_keys() -> set[str]:
    """The keys of summary.json."""
    return set(_names(PAGE.read_text("utf-8").partition(SUMMARY)[2]))


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
