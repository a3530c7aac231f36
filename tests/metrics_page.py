"""The keys that docs/metrics.md lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def unlisted(keys: Iterable[str]) -> list[str]:
    """Those of `keys` that belong to no family of the page."""
    return sorted(key for key in keys if not _families().fullmatch(key))


@cache
def _families() -> re.Pattern[str]:
    """`<…>` in a key stands for any name."""
    first_cells = [
        line.split("|")[1] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")
    ]
    names = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    return re.compile("|".join(".+".join(map(re.escape, re.split(r"<[^>]+>", name))) for name in names))
