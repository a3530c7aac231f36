"""`asyncrl.train` without a YAML file, for real: from cells, and from a kernel of Jupyter."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest
from notebook_cells import session
from processes import ran

import asyncrl

pytestmark = pytest.mark.slow

SETUP = """\
import re
import asyncrl

DIGITS = re.compile("[0-9]")
"""

FUNCTIONS = """\
def digits(text):
    return DIGITS.findall(text)


async def reward(task, text):
    return {"digits": len(digits(text)), "right": float(text == task.data["answer"])}
"""

TRAIN = """\
result = asyncrl.train(
    model=MODEL,
    tasks=[{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)],
    reward=reward,
    max_staleness=1,
    run={"dir": RUNS, "versions": 2},
    batch={"groups": 2, "group_size": 4},
    generator={"slots": 8, "max_tokens": 4, "max_length": 16, "threads": 1, "heartbeat_s": 0.2},
    learner={"threads": 1},
)
"""


def check(result: asyncrl.TrainResult, folder: Path) -> None:
    assert result.folder == folder
    assert (result["versions"], result["groups_trained"]) == (2, 4)
    assert [row["version"] for row in result.rows] == [1, 2]
    assert "rollout/reward/part/digits" in result.rows[0]
    assert (result.model / "config.json").is_file()


def test_functions_of_cells_train(model_folder: Path, tmp_path: Path) -> None:
    given = f"MODEL, RUNS = {str(model_folder)!r}, {str(tmp_path)!r}\n"
    with session(SETUP, FUNCTIONS, given, TRAIN) as cells:
        check(cells.result, tmp_path / "run")


@pytest.mark.timeout(300)
def test_the_page_trains(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/python.md, its script and its cells."""
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text("utf-8")
    script, *cells = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(model_folder)
    (tmp_path / "train.py").write_text(script)
    printed = ran("train.py")
    assert printed.rstrip().endswith("runs/sums/final")
    with session(*cells) as notebook:
        assert len(notebook.curve) == 2
        assert "eval/accuracy" in {key for row in notebook.result.rows for key in row}
        assert notebook.result.folder == Path("runs/run")


@pytest.mark.timeout(300)
def test_a_notebook_trains(model_folder: Path, tmp_path: Path) -> None:
    given = f"MODEL, RUNS = {str(model_folder)!r}, {str(tmp_path)!r}\n"
    show = "print(repr(result)); print([row['version'] for row in result.rows])"
    new = nbformat.v4
    cells = [new.new_code_cell(cell) for cell in (SETUP, FUNCTIONS, given, TRAIN, show)]
    notebook = new.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    printed = notebook.cells[-1].outputs[0].text
    assert "TrainResult(done at version 2" in printed
    assert "[1, 2]" in printed
