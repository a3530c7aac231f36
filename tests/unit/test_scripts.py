"""Functions of a user's own script, which the other processes of a run import by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl.config.dotted import load_function, name_function
from asyncrl.errors import ConfigError

UNGUARDED = """\
import asyncrl

def reward(task, text):
    return 1.0

asyncrl.train("config.yaml", reward=reward)
"""


def test_a_script_that_begins_its_run_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"script.py'.*under `if __name__ == '__main__':`") as refusal:
            load_function(f"{script}:reward", "reward.function")
        assert refusal.value.key == "script"


@pytest.mark.parametrize("file", [None, "<stdin>", "/nowhere/<ipython-input-1>"])
def test_functions_that_stand_in_no_file_are_refused(
    file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("typed_in")
    if file is not None:
        module.__file__ = file
    exec("def reward(task, text): return 1.0", module.__dict__)
    monkeypatch.setitem(sys.modules, "typed_in", module)
    reward: Callable[..., float] = module.reward
    with pytest.raises(ConfigError, match=r"stands in no file .*move it to a .py file"):
        name_function(reward, "reward")
