"""The first line of a command that loads for seconds comes before the imports that take them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

CONFIG = """
run: {{name: it, dir: {folder}}}
model: {{path: m}}
tasks: {{source: "asyncrl.tasks.addition:train"}}
reward: {{function: "asyncrl.tasks.addition:reward"}}
queue: {{address: "tcp://127.0.0.1:5555"}}
"""

HEAVY = {
    "train": ["train", "CONFIG"],
    "sft": ["sft", "CONFIG"],
    "reward-model": ["reward-model", "CONFIG"],
    "dpo": ["dpo", "CONFIG"],
    "eval": ["eval", "CONFIG", "--model", "m"],
    "generate": ["generate", "CONFIG", "--model", "m", "--prompt", "1+1="],
    "bench": ["bench", "climb"],
    "learner": ["learner", "CONFIG"],
    "generator": ["generator", "CONFIG"],
    "pool": ["pool", "CONFIG", "reference"],
    "export": ["export", "FOLDER", "OUT", "--config", "CONFIG"],
}

PROBE = """
import json, os, sys

class Heavy(BaseException):
    pass

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise Heavy(name)

sys.meta_path.insert(0, Refuse())
from asyncrl.cli import main
for name, words in json.loads(sys.argv[1]).items():
    print("BEGIN", name, file=sys.stderr)
    try:
        main(words)
        print("END", file=sys.stderr)
    except Heavy as heavy:
        print("HEAVY", heavy, file=sys.stderr)
    except SystemExit:
        print("EXIT", file=sys.stderr)
"""


def first_lines(tmp_path: Path, commands: Sequence[str], **env: str) -> dict[str, list[str]]:
    """What each heavy command writes to stderr before it imports torch or transformers, where it is stopped."""
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    paths = {"CONFIG": str(tmp_path / "config.yaml"), "FOLDER": str(tmp_path), "OUT": str(tmp_path / "out")}
    words = {
        name: [paths.get(word, word) for word in line] for name, line in HEAVY.items() if name in commands
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(words)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    found: dict[str, list[str]] = {}
    for line in done.stderr.splitlines():
        if line.startswith("BEGIN "):
            lines = found.setdefault(line.removeprefix("BEGIN "), [])
        else:
            lines.append(line)
    return found


def test_every_heavy_command_says_what_it_loads_before_it_imports_torch(tmp_path: Path) -> None:
    found = first_lines(tmp_path, list(HEAVY))
    assert list(found) == list(HEAVY)
    for name, lines in found.items():
        assert lines[0].startswith(f"asyncrl {name}: loading "), lines
        assert lines[0].endswith(" …")
        assert lines[1].startswith("HEAVY "), lines


@pytest.mark.parametrize("variable", ["ASYNCRL_LAUNCHED", "RANK"])
def test_neither_a_launched_process_nor_a_second_rank_says_it(tmp_path: Path, variable: str) -> None:
    assert first_lines(tmp_path, ["generator"], **{variable: "1"})["generator"][0].startswith("HEAVY ")
