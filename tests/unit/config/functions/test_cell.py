"""A function of notebook cells as a module that another process runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import notebook_cells
import pytest
from notebook_cells import session

from asyncrl.config.functions.function_spec import load_function, name_function
from asyncrl.config.functions.notebook_cell import CellError, module_text
from asyncrl.errors import ConfigError

HERE = Path(__file__).parent

IMPORTS = """\
import json as j
import re
from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt as root

import numpy as np

DIGITS = re.compile(r"[0-9]")
NAMES = {"gamma", "alpha", "beta"}
TABLE = [{"prompt": f"{n}+1=", "code": 'if __name__ == "__main__": pass'} for n in range(40)]
SCALE = np.arange(3.0)
"""

DEFINITIONS = """\
@dataclass
class Rule:
    weight: float = 0.5
    seen: list = field(default_factory=list)

    def __call__(self, text: str) -> float:
        return self.weight * len(digits(text))

square = lambda x: x * x
alias = square

@lru_cache
def digits(text):
    return tuple(DIGITS.findall(text))

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n > 0 and even(n - 1)

async def reward(task, text, rule=Rule):
    counted = [j for j in text]
    return {
        "digits": rule()(text),
        "root": root(alias(3)) + SCALE[2],
        "names": float("beta" in NAMES and even(4)),
        "length": float(len(counted)),
    }

def tasks():
    return TABLE
"""


def test_a_function_takes_along_what_it_reads(tmp_path: Path) -> None:
    with session(IMPORTS, DEFINITIONS) as cells:
        here = asyncio.run(cells.reward(None, "a1b2"))
        texts = {name: module_text(getattr(cells, name)) for name in ("reward", "tasks")}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    there = load_function(f"{tmp_path}/reward.py:reward", "reward.function")
    assert (
        asyncio.run(there(None, "a1b2")) == here == {"digits": 1.0, "root": 5.0, "names": 1.0, "length": 4.0}
    )
    rows = load_function(f"{tmp_path}/tasks.py:tasks", "tasks.source")()
    assert rows[39] == {"prompt": "39+1=", "code": 'if __name__ == "__main__": pass'}
    assert "import json" not in texts["reward"]  # `j` is a local name there


def test_the_same_cells_give_the_same_text_in_another_session() -> None:
    """By it a run is resumed with the reward and the tasks that it was begun with."""
    program = (
        "from notebook_cells import session; from test_cell import IMPORTS, DEFINITIONS;"
        "from asyncrl.config.functions.notebook_cell import module_text\n"
        "with session(IMPORTS, DEFINITIONS) as cells: print(module_text(cells.reward))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={
                "PYTHONPATH": os.pathsep.join(
                    map(str, (HERE, HERE.parents[3], Path(notebook_cells.__file__).parent))
                ),
                "PYTHONHASHSEED": seed,
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert "NAMES" in texts.pop()


def test_a_class_of_a_cell_is_that_of_the_newest_one() -> None:
    first, second = "class Rule:\n    value = 1\n", "class Rule:\n    value = 2\n"
    with session(first, second, "def reward(task, text): return Rule.value\n") as cells:
        text = module_text(cells.reward)
    assert "value = 2" in text
    assert "value = 1" not in text


def test_modules_beside_the_notebook_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_notebook.py").write_text("def half(x): return x / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with session(
        "from beside_the_notebook import half\n", "def reward(task, text): return half(3)\n"
    ) as cells:
        text = module_text(cells.reward)
    run = subprocess.run(
        [sys.executable, "-c", f"{text}\nprint(reward(None, ''))"], capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "1.5\n", run.stderr


@pytest.mark.parametrize(
    ("cell", "rule"),
    [
        ("import threading\nLOCK = threading.Lock()\ndef reward(task, text): return LOCK\n", "LOCK, a lock, cannot"),
        ("class Judge: pass\nJUDGE = Judge()\ndef reward(task, text): return JUDGE\n", "its class Judge stands in a"),
        ("def make(n):\n    def inner(): return n\n    return inner\nINNER = make(1)\n"
         "def reward(task, text): return INNER()\n", "inner reads n of the function around it"),
    ],
)  # fmt: skip
def test_what_no_file_can_hold_is_named(cell: str, rule: str, tmp_path: Path) -> None:
    with session(cell) as cells:
        with pytest.raises(CellError, match=rule):
            module_text(cells.reward)
        with pytest.raises(ConfigError, match=rf"stands in no file .*{rule}.*move it to a .py file"):
            name_function(cells.reward, "reward", lambda name, text: tmp_path / "reward.py")
