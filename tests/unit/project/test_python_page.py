"""docs/python.md: every block runs, up to the launcher; tests/e2e/commands/test_python_run.py runs them whole."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from notebook_cells import session

import asyncrl
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError
from asyncrl.launch import local_run
from asyncrl.launch.folder.run_folder import run_folder
from asyncrl.launch.preflight import preflight

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "python.md").read_text("utf-8")
SCRIPT, *CELLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
REFUSED = re.findall(r"^\| `(.*?)` \| (.*?) \|$", PAGE.partition("## Refusals")[2], re.MULTILINE)

SUMMARY = {"ended": "done", "versions": 2, "reward_start": 0.25, "reward_end": 0.5}


@pytest.fixture
def launched(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations with which the launcher is called; each run ends well at once."""
    seen: list[Config] = []

    def train(config: Config) -> dict[str, Any]:
        seen.append(config)
        run_folder(config).mkdir(parents=True, exist_ok=True)
        (run_folder(config) / "metrics.jsonl").write_text(
            json.dumps({"version": 1, "rollout/reward/mean": 0.25}) + "\n"
        )
        return dict(SUMMARY)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_run, "train", train)
    (tmp_path / "my-model").symlink_to(model_folder)
    return seen


def test_the_script_runs(launched: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    runpy.run_path(str(script), run_name="__main__")
    (config,) = launched
    assert config.reward.function == f"{script}:reward"
    assert capsys.readouterr().out == "0.25 -> 0.5 runs/sums/final\n"


def test_the_cells_run(launched: list[Config]) -> None:
    with session(*CELLS) as cells:
        assert cells.curve == [0.25]
        assert dict(cells.result) == SUMMARY
    (config,) = launched
    assert str(config.evaluation.source).endswith(".jsonl")


@pytest.mark.parametrize(("arguments", "told"), REFUSED, ids=[arguments for arguments, _ in REFUSED])
def test_what_the_page_has_as_refused_is(
    launched: list[Config], tmp_path: Path, arguments: str, told: str
) -> None:
    with session(SCRIPT) as cells:
        given = {"model": "my-model", "tasks": cells.rows, "reward": cells.reward}
        given |= eval(f"dict({arguments})", {"rows": cells.rows})
        with pytest.raises(AsyncRLError) as refusal:
            asyncrl.train(**given)
    assert told in str(refusal.value)
    assert launched == []
    assert list((tmp_path / "runs").glob("*")) == []


def test_the_table_of_refusals_is_read() -> None:
    assert len(REFUSED) == 7


def test_the_example_is_the_same_from_python_and_from_the_command_line(
    launched: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    model = str(tmp_path / "my-model")
    monkeypatch.setattr("sys.argv", ["own_task.py", model, f"run.dir={tmp_path}"])
    with pytest.raises(KeyError, match="train_s"):  # it prints what the fake run has not
        runpy.run_path("examples/own_task.py", run_name="__main__")
    (from_python,) = launched
    words = [f"model.path={model}", f"run.dir={tmp_path}"]
    by_command = load_config("examples/own_task.yaml", words)
    preflight(by_command)
    for one in ("tasks.source", "reward.function"):
        words.append(f"{one}={ROOT}/examples/own_task.py:{'tasks' if one[0] == 't' else 'reward'}")
    assert load_config("examples/own_task.yaml", words) == from_python
