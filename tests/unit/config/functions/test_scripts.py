"""Functions of a user's own script, which the other processes of a run import by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl.config.functions.function_spec import load_function, name_function
from asyncrl.errors import ConfigError
from asyncrl.launch.processes import process_env

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


@pytest.mark.parametrize("spec", ["mine:reward", "pkg.rewards:reward", "mine.py:reward"])
def test_files_in_the_working_folder_are_found_but_hide_no_module_of_python(
    tmp_path: Path, spec: str
) -> None:
    text = "import random\n\n\ndef reward(task, text):\n    return random.random()\n"
    (tmp_path / "pkg").mkdir()
    for name in ("mine.py", "pkg/rewards.py"):
        (tmp_path / name).write_text(text)
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')\n")
    program = (
        "from asyncrl.config.functions.function_spec import load_function\n"
        f"print(load_function({spec!r}, 'reward.function')(None, '') < 1)\n"
    )
    command = [sys.executable, "-c", program]
    env = {**os.environ, **process_env(threads=1)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr
