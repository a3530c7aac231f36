"""`asyncrl demo`: what it makes, what it keeps and what it replaces. Whole demos run in test_wheel.py."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl import demo as demos
from asyncrl.cli import run
from asyncrl.errors import ConfigError, ProcessDiedError


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / 'my "runs"'


@pytest.fixture
def sft(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of warm-ups, each of which writes a model as the real one does, without training it."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        output = demos.load_config(command[4], command[5:]).sft.output
        Path(output).mkdir(parents=True)
        (Path(output) / "config.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def past_run(folder: Path, of_demo: bool = True) -> None:
    folder.mkdir(parents=True)
    for name in ("lock", "config.yaml", "metrics.jsonl", *([demos.MARK] if of_demo else [])):
        (folder / name).write_text("x")


def test_the_warm_up_is_made_once_and_whole(runs: Path, sft: list[list[str]]) -> None:
    first = demos.demo(str(runs))
    assert "only this time" in first.plan()
    demos.warm_up(first)
    demos.warm_up(demos.demo(str(runs)))
    assert len(sft) == 1
    assert demos.load_config(sft[0][4], sft[0][5:]).model.path == str(runs / "addition/model")
    assert {file.name for file in (runs / "addition/model").iterdir()} >= {"config.json", "tokenizer.json"}
    assert [file.name for file in (runs / "addition/warm").iterdir()] == ["config.json"]
    assert "is there already" in demos.demo(str(runs)).plan()


def test_half_a_warm_up_is_made_again(
    runs: Path, sft: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = subprocess.run

    def fail(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        write(command)
        return subprocess.CompletedProcess(command, 9)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ProcessDiedError, match="exit code 9") as died:
        demos.warm_up(demos.demo(str(runs)))
    assert died.value.exit_code == 9
    assert not (runs / "addition/warm").exists()
    monkeypatch.setattr(subprocess, "run", write)
    demos.warm_up(demos.demo(str(runs)))
    assert (runs / "addition/warm/config.json").exists()


def test_a_model_of_the_users_needs_no_warm_up(runs: Path, sft: list[list[str]]) -> None:
    demos.warm_up(demos.demo(str(runs), ["model.path=mine"]))
    assert sft == []


def test_an_earlier_demo_is_replaced(runs: Path) -> None:
    past_run(runs / "demo")
    again = demos.demo(str(runs))
    assert "replaces the earlier run" in again.plan()
    demos.clear_folder(again)
    assert [path.name for path in (runs / "demo").iterdir()] == [demos.MARK]


@pytest.mark.parametrize(("name", "word"), [("mine", "run.name=mine"), ("demo", "run.resume=true")])
def test_no_other_run_is_replaced(runs: Path, name: str, word: str) -> None:
    past_run(runs / name)
    demos.clear_folder(demos.demo(str(runs), [word]))
    assert (runs / name / "metrics.jsonl").exists()


def test_a_folder_that_is_no_run_stays(runs: Path) -> None:
    (runs / "demo").mkdir(parents=True)
    (runs / "demo/config.yaml").write_text("the user's own")
    for refuse in (demos.check_folder, demos.clear_folder):
        with pytest.raises(ConfigError, match=r"no demo has made it.*set run\.name=NAME"):
            refuse(demos.demo(str(runs)))
    assert [path.name for path in (runs / "demo").iterdir()] == ["config.yaml"]


def test_a_users_run_is_refused_before_the_warm_up(
    runs: Path, sft: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    past_run(runs / "demo", of_demo=False)
    assert cli.main(["demo", "--dir", str(runs)]) == 2
    error = capsys.readouterr().err
    assert "no demo has made it" in error
    assert f"remove {runs}/demo if a demo of an earlier version of asyncrl has made it" in error
    assert (runs / "demo/metrics.jsonl").exists()
    assert sft == []


def test_nothing_is_removed_under_another_run_dir(runs: Path, tmp_path: Path) -> None:
    past_run(tmp_path / "mine/demo")
    demos.clear_folder(demos.demo(str(runs), [f"run.dir={tmp_path}/mine"]))
    assert (tmp_path / "mine/demo/metrics.jsonl").exists()


def test_a_failed_warm_up_leaves_the_earlier_demo(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 9))
    past_run(runs / "demo")
    assert cli.main(["demo", "--dir", str(runs)]) != 0
    assert "warm-up ended with exit code 9" in capsys.readouterr().err
    assert (runs / "demo/metrics.jsonl").exists()


def test_a_link_is_never_followed(runs: Path, tmp_path: Path) -> None:
    past_run(tmp_path / "mine")
    runs.mkdir()
    (runs / "demo").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="no demo has made it"):
        demos.check_folder(demos.demo(str(runs)))
    assert (tmp_path / "mine/metrics.jsonl").exists()


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, sft: list[list[str]]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^--dir = .*file': .*cannot be made"):
        demos.warm_up(demos.demo(str(tmp_path / "file")))


def test_files_in_the_place_of_the_model_stay(runs: Path, sft: list[list[str]]) -> None:
    (runs / "addition/warm").mkdir(parents=True)
    (runs / "addition/warm/notes").touch()
    with pytest.raises(ConfigError, match=r"^--dir = .*no folder of a model"):
        demos.warm_up(demos.demo(str(runs)))
    assert (runs / "addition/warm/notes").exists()
    assert sft == []


def test_two_demos_do_not_make_the_same_model(runs: Path, sft: list[list[str]]) -> None:
    (runs / "addition").mkdir(parents=True)
    with (runs / "addition/lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another demo is making the warmed-up model"):
            demos.warm_up(demos.demo(str(runs)))
    assert sft == []


def test_any_folder_name_is_taken_as_it_is(tmp_path: Path, sft: list[list[str]]) -> None:
    folder = tmp_path / "läufe 🎉"
    planned = demos.demo(str(folder))
    assert planned.config.run.dir == str(folder)
    demos.warm_up(planned)
    assert (folder / "addition/warm/config.json").exists()


def test_a_live_demo_is_not_replaced(runs: Path) -> None:
    past_run(runs / "demo")
    with (runs / "demo/lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="a live run uses"):
            demos.clear_folder(demos.demo(str(runs)))
    assert (runs / "demo/metrics.jsonl").exists()


def test_the_command_trains_what_it_has_planned(
    runs: Path, sft: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []
    monkeypatch.setattr(run, "_run", lambda config: trained.append(config) or 0)
    assert cli.main(["demo", "--dir", str(runs), "--engine", "vllm", "run.versions=3"]) == 0
    (config,) = trained
    assert (config.run.dir, config.run.versions) == (str(runs), 3)
    assert (config.model.path, config.generator.engine) == (str(runs / "addition/warm"), "vllm")
    assert capsys.readouterr().out.startswith("A small model learns two-digit addition.")


def test_the_warm_up_alone(runs: Path, sft: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_run", lambda config: pytest.fail("it trains"))
    past_run(runs / "demo")
    assert cli.main(["demo", "--dir", str(runs), "--warm-up"]) == 0
    assert (runs / "addition/warm/config.json").exists()
    assert (runs / "demo/metrics.jsonl").exists()


def test_a_wrong_key_is_refused_before_any_work(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--dir", str(runs), "run.version=3"]) == 2
    assert "did you mean run.versions?" in capsys.readouterr().err
    assert not runs.exists()
