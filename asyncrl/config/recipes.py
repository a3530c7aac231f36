"""The first comment of a recipe: its purpose, and lines of a word and a text.

# GSM8K on one GPU: the smallest real run.
#
#   hardware   1 GPU of 24 GB
#   command    asyncrl train …
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from asyncrl.config.load import CONFIGS

HEAD_LINE = re.compile(r"#   (not yet|[a-z]+) {2,}(\S.*)")


@dataclass(frozen=True, slots=True)
class RecipeHead:
    """about: one sentence · says: {'hardware': …, 'command': …, …}"""

    path: Path
    about: str
    says: Mapping[str, str]


def recipe_heads() -> list[RecipeHead]:
    """The heads of all recipes, by folder and name. `recipes/parts` has what they include."""
    paths = (path for path in (CONFIGS / "recipes").rglob("*.yaml") if path.parent.name != "parts")
    return [read_head(path) for path in sorted(paths, key=lambda path: (path.parent, path.name))]


def read_head(path: Path) -> RecipeHead:
    about, *lines = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
    says: dict[str, str] = {}
    name = ""
    for line in lines:
        if found := HEAD_LINE.fullmatch(line):
            name, says[found[1]] = found[1], found[2]
        elif name and line.startswith("#    "):
            says[name] += f" {line.removeprefix('#').strip()}"
        else:
            name = ""
    return RecipeHead(path, about.removeprefix("# "), says)
