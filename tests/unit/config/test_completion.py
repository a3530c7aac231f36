"""The scripts by which shells complete `asyncrl`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from asyncrl import cli

ASK = """\
source {script}
COMP_LINE="$1"; COMP_POINT=${{#1}}
read -ra COMP_WORDS <<< "$1"
[[ "$1" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_asyncrl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        (tmp_path / shell).write_text(capsys.readouterr().out)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "notes.txt").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("asyncrl trai", ["train"]),
        ("asyncrl queue st", ["status"]),
        ("asyncrl sync ", ["plan"]),
        ("asyncrl train m", ["mine.yaml"]),
        ("asyncrl train n", []),
        ("asyncrl train mine.yaml queue.max_st", ["queue.max_staleness="]),
        ("asyncrl train mine.yaml algorithm.loss=gs", ["gspo"]),
        ("asyncrl config mine.yaml --sch", ["--schema"]),
        ("asyncrl queue status --j", ["--json"]),
        ("asyncrl sync plan mine.yaml batch.groups", ["batch.groups="]),
        ("asyncrl plan mine.yaml --sa", ["--save"]),
        ("asyncrl tune mine.yaml --re", ["--repetitions"]),
        ("asyncrl keys queue.max_st", []),
    ],
)
def test_bash_offers(folder: Path, line: str, offers: list[str]) -> None:
    (folder / "ask").write_text(ASK.format(script=folder / "bash"))
    words = ["bash", "--norc", str(folder / "ask"), line]
    asked = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=30)
    assert asked.stdout.split() == offers, asked.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_that_is_here_takes_its_script(folder: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n", str(folder / shell)], check=True, timeout=30)
