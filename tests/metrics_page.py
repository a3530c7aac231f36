"""The keys that docs/metrics.md lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


SUMMARY = "## summary.json"


def unlisted(keys: Iterable[str]) -> list[str]:
    """Those of `keys` that belong to no family of the rows."""
    return sorted(key for key in keys if not _families().fullmatch(key))


def summary_keys() -> set[str]:
    return set(_names(PAGE.read_text("utf-8").partition(SUMMARY)[2]))


@cache
def _families() -> re.Pattern[str]:
    """`<…>` in a key stands for any name."""
    names = _names(PAGE.read_text("utf-8").partition(SUMMARY)[0])
    return re.compile("|".join(".+".join(map(re.escape, re.split(r"<[^>]+>", name))) for name in names))


def _names(text: str) -> list[str]:
    """Those in the first cells of its tables."""
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
