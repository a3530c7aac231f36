"""The recipes of `asyncrl demo --recipe`: whether each climbs to its stated score, in at most five minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from asyncrl.demo import RECIPES
from bench.bars import Bar
from bench.process import ROOT

STATED: Mapping[str, float] = {
    "search": 0.85,
    "python": 0.5,
    "pictures": 0.8,
    "sokoban": 5.0,
    "webshop": 0.55,
}
"""The score of held-out tasks at the end. docs/recipes.md has what a run has reached, and that of a random policy."""
LONGEST_S = 300
"""Of a whole recipe: tokenizer, warm-up and training."""
DEADLINE_S = 1200

BARS = tuple(
    bar
    for name, score in STATED.items()
    for bar in (Bar(f"{name}_score", score), Bar(f"{name}_s", LONGEST_S, most=True))
)


def names() -> dict[str, str]:
    """Figures of this file, and their meaning."""
    return {
        key: text
        for name in STATED
        for key, text in (
            (f"{name}_warm", f"recipe {name}: score after the warm-up"),
            (f"{name}_score", f"recipe {name}: score at the end"),
            (f"{name}_s", f"recipe {name}: seconds"),
        )
    }


def climbs(chosen: Iterable[str], folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in chosen:
        begun = time.perf_counter()
        words = [sys.executable, "-m", "asyncrl", "demo", "--recipe", name, "--dir", str(folder)]
        with (folder / f"{name}.log").open("w") as log:
            subprocess.run(words, stdout=log, stderr=log, check=True, timeout=DEADLINE_S, cwd=ROOT)
        found[f"{name}_s"] = time.perf_counter() - begun
        summary = json.loads((folder / RECIPES[name].own_name / "summary.json").read_text())
        found[f"{name}_warm"] = summary["heldout_accuracy_start"]
        found[f"{name}_score"] = summary["heldout_accuracy_end"]
        print(name, {key: found[key] for key in found if key.startswith(name)}, file=sys.stderr, flush=True)
    return found
