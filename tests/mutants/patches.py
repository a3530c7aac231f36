"""The list of broken lines: every `*.toml` beside this file, one table a line.

[clipping_is_off]
breaks = "gradients are no longer clipped"        # one sentence: what is wrong with the line broken
file = "asyncrl/learner/training/version_step.py"
old = "min(1.0, limit / norm)"                    # occurs exactly once in the file
new = "1.0"
tests = ["tests/unit/generator/scoring/test_steps.py::test_clips"]  # quick: files or tests; one must fail
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """One entry: `name` is the title of its table."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def broken(self, root: Path = ROOT) -> str:
        """The text of the file with the line broken.

        Raises:
            ValueError: The file does not hold `old` exactly once, so that the entry must be renewed.
        """
        text = (root / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} holds the text of `old` {found} times, not once")
        return text.replace(self.old, self.new)


def read_mutants(words: Sequence[str] = ()) -> list[Mutant]:
    """All entries, or those whose name or file contains one of `words`."""
    mutants = [
        Mutant(name, **{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(FOLDER.glob("*.toml"))
        for name, entry in tomllib.loads(path.read_text()).items()
    ]
    return [
        one for one in mutants if not words or any(word in one.name or word in one.file for word in words)
    ]
