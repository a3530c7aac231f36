"""Tests that are skipped for something missing are named at the end of a run, and fail a run of CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import missing
import pytest

HERE = Path(missing.__file__).parent
PATH = f"{HERE.parents[1]}{os.pathsep}{HERE}"
"""Of the tests' conftest, and of what it imports."""

FILE = """
import missing, pytest

@pytest.mark.parametrize("n", range(3))
def test_redis(n):
    pytest.skip(missing.REDIS)

@pytest.mark.skipif(True, reason="Linux alone")
def test_elsewhere():
    pass

def test_here():
    pass
"""


def test_a_run_of_ci_names_them_and_fails(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FILE)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "conftest",
        "-c",
        os.devnull,
        f"--rootdir={tmp_path}",
    ]
    env = {**os.environ, "PYTHONPATH": PATH, "CI": "true"}
    done = subprocess.run([*words, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    named = [line for line in done.stdout.splitlines() if "Remedy" in line]
    assert named == [f"skipped 3: {missing.REDIS}. Remedy: {missing.REMEDIES[missing.REDIS]}"]


def test_only_ci_fails_and_only_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert not missing.fails_ci([missing.VLLM])
    monkeypatch.setenv("CI", "true")
    assert missing.fails_ci(["there is a GPU", f"Skipped: {missing.VLLM}"])
    assert not missing.fails_ci(["there is a GPU"])
    assert missing.lines(["there is a GPU"]) == []


def test_the_probe_of_the_product_decides_on_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "sandbox_problem", lambda kind="auto": "not permitted")
    with pytest.raises(pytest.skip.Exception, match=missing.NAMESPACES):
        missing.skip_without_sandbox()
    (line,) = missing.lines([missing.NAMESPACES])
    assert "the sandbox's probe: not permitted" in line
    monkeypatch.setattr(missing, "sandbox_problem", lambda kind="auto": None)
    missing.skip_without_sandbox()
