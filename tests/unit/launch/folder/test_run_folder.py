"""The folder of a run: what blocks a name, and what a resume notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch import local_run
from asyncrl.launch.folder.run_folder import (
    OF_A_LEARNER,
    claimed_by_learner,
    claimed_run_folder,
    locked_run_folder,
    read_summary,
    refuse_foreign_files,
    refuse_own_config,
    remove_empty,
)
from asyncrl.launch.views.process_reports import SUFFIX

BASE = """\
run: {{dir: {folder}, name: it}}
model: {{path: some/model}}
tasks: {{source: "some.module:function"}}
reward: {{function: "{folder}/rewards.py:right"}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "rewards.py").write_text("def right(task, text): return 1.0\n")
    return changed(tmp_path)


def changed(folder: Path, *words: str) -> Config:
    (folder / "base.yaml").write_text(BASE.format(folder=folder))
    return load_config(folder / "base.yaml", words)


def begun(config: Config) -> Path:
    """The folder of a run that was begun, and has ended before its first checkpoint."""
    with claimed_run_folder(config) as (folder, _):
        return folder


def test_a_run_that_was_stopped_at_version_0_makes_room(config: Config, tmp_path: Path) -> None:
    run = begun(config)
    (run / "checkpoints" / "v000000").mkdir(parents=True)
    (run / "metrics.jsonl").write_text(json.dumps({"version": 0, "eval/accuracy": 0.3}) + "\n")
    (run / "rollouts.jsonl").write_text("{}\n")
    with claimed_run_folder(config):
        assert not (run / "metrics.jsonl").exists()
        assert not list(run.glob("checkpoints/*"))


@pytest.mark.parametrize("left", ["row", "checkpoint", "final"])
def test_one_that_has_trained_keeps_its_name(config: Config, tmp_path: Path, left: str) -> None:
    run = begun(config)
    (run / "checkpoints" / "v000000").mkdir(parents=True)
    if left == "row":
        (run / "metrics.jsonl").write_text(json.dumps({"version": 1}) + "\n")
    else:
        (run / ("final" if left == "final" else "checkpoints/v000001")).mkdir()
    with (
        pytest.raises(ConfigError, match=r"^run\.name = 'it': .* holds a run already"),
        claimed_run_folder(config),
    ):
        pass
    assert (run / "checkpoints" / "v000000").exists()


def test_a_resume_names_the_function_whose_code_has_changed(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claimed_run_folder(config):
        pass
    again = changed(tmp_path, "run.resume=true")
    with claimed_run_folder(again):
        assert "other code" not in capsys.readouterr().err
    (tmp_path / "rewards.py").write_text("def right(task, text): return 0.0\n")
    with claimed_run_folder(again):
        told = capsys.readouterr().err
    assert f"goes on with other code: reward.function = {tmp_path}/rewards.py:right, whose file" in told
    with claimed_run_folder(again):
        assert "other code" not in capsys.readouterr().err


def test_a_resume_names_the_engine_of_a_pool_whose_code_has_changed(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine.py"
    engine.write_text("def load(config, tokenizer, name): ...\n")
    own = f"placement.generators.small.own_engine={engine}:load"
    with claimed_run_folder(changed(tmp_path, own)):
        pass
    engine.write_text("def load(config, tokenizer, name): return None\n")
    with claimed_run_folder(changed(tmp_path, own, "run.resume=true")):
        told = capsys.readouterr().err
    assert f"goes on with other code: placement.generators.small.own_engine = {engine}:load" in told


def test_a_new_run_has_no_code_before(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claimed_run_folder(config):
        pass
    (tmp_path / "rewards.py").write_text("def right(task, text): return 0.0\n")
    with claimed_run_folder(config):
        assert "other code" not in capsys.readouterr().err


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


PRINTED = "# asyncrl 9.9\n# the user's copy\n"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"config.yaml": "mine: 1", "logs/a.log": "a", "metrics.jsonl": "m", "summary.json": "{}"},
            r"config\.yaml",
        ),
        ({"config.yaml": "mine: 1", "lock": "12"}, r"config\.yaml"),
        ({"lock": "of another tool"}, "lock"),
        ({"lock": "of another tool", "config.yaml": PRINTED}, "lock"),
    ],
)
def test_a_folder_with_the_users_files_is_refused_and_stays(
    tmp_path: Path, files: dict[str, str], found: str, resume: bool
) -> None:
    run = tmp_path / "it"
    for name, text in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    config = changed(tmp_path, f"run.resume={str(resume).lower()}")
    with (
        pytest.raises(ConfigError, match=rf"^run\.name = 'it': .* holds .*{found}.*set another run\.name"),
        claimed_run_folder(config),
    ):
        pass
    assert contents(run) == files


@pytest.mark.parametrize(
    "name", ["config.yaml", "logs/a.log", "metrics.jsonl", "checkpoints/v1/model", "final/a", "address"]
)
def test_each_thing_that_a_run_replaces_is_the_users_without_the_marks(
    config: Config, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "it" / name
    path.parent.mkdir(parents=True)
    path.write_text(PRINTED)
    with pytest.raises(ConfigError, match=r"not the lock and the config\.yaml"), claimed_run_folder(config):
        pass
    assert contents(tmp_path / "it") == {name: PRINTED}


def test_a_learner_that_is_started_by_hand_spares_the_users_files_too(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "it"
    run.mkdir()
    (run / "address").write_text("tcp://127.0.0.1:1")  # of the queue, which was started before
    refuse_foreign_files(run, config, OF_A_LEARNER)
    (run / "config.yaml").write_text("mine: 1")
    with pytest.raises(ConfigError, match=r"holds config\.yaml"):
        refuse_foreign_files(run, config, OF_A_LEARNER)
    (run / "config.yaml").write_text(PRINTED)
    refuse_foreign_files(run, config, OF_A_LEARNER)


def test_a_learner_that_is_started_by_hand_leaves_a_folder_that_a_run_knows(
    config: Config, tmp_path: Path
) -> None:
    run = tmp_path / "it"
    run.mkdir()
    (run / "address").write_text("tcp://127.0.0.1:1")  # of the queue, which was started before
    with (
        claimed_by_learner(config, tmp_path / "base.yaml"),
        pytest.raises(ConfigError, match="a live run uses"),
        claimed_run_folder(config),
    ):
        pass
    (run / "metrics.jsonl").write_text(json.dumps({"version": 1}) + "\n")
    with (
        pytest.raises(ConfigError, match=r"holds a run already.*run\.resume=true"),
        claimed_run_folder(config),
    ):
        pass
    with claimed_run_folder(changed(tmp_path, "run.resume=true")):
        assert (run / "metrics.jsonl").exists()


def test_a_run_in_separate_processes_of_an_earlier_version_is_refused_with_its_remedy(
    config: Config, tmp_path: Path
) -> None:
    run = begun(config)
    (run / "lock").unlink()
    (run / "metrics.jsonl").write_text(json.dumps({"version": 1}) + "\n")
    with pytest.raises(ConfigError, match=r"left no lock: set run\.resume=true"), claimed_run_folder(config):
        pass
    with claimed_run_folder(changed(tmp_path, "run.resume=true")):
        assert (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_damaged_summary_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"summary\.json cannot be read.*Remedy: remove it"):
        read_summary(tmp_path)


def test_a_new_run_does_not_write_over_the_file_it_was_started_with(config: Config, tmp_path: Path) -> None:
    own = begun(config) / "config.yaml"
    with pytest.raises(ConfigError, match=r"would write its own configuration.*run\.resume=true"):
        refuse_own_config(own, config)
    refuse_own_config(own, changed(tmp_path, "run.resume=true"))
    refuse_own_config(tmp_path / "base.yaml", config)


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    config = changed(tmp_path, f"run.dir={tmp_path}/rewards.py")
    (tmp_path / "rewards.py").touch()
    with pytest.raises(ConfigError, match=r"^run\.dir = .*cannot be made"), locked_run_folder(config):
        pass


def test_the_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert changed(tmp_path, "run.dir=~/runs").run.dir == str(tmp_path / "runs")
    assert changed(tmp_path, "queue.keys=~/keys").queue.keys == str(tmp_path / "keys")
    for key in ("model", "critic", "reference", "reward_model", "teacher"):
        assert getattr(changed(tmp_path, f"{key}.path=~/m"), key).path == str(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"^run\.dir = '~nobody-of-this-name/runs': begins with ~"):
        changed(tmp_path, "run.dir=~nobody-of-this-name/runs")


def test_a_lock_that_was_removed_with_its_folder_is_not_taken(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder goes between the opening of the lock and the taking of it: the next try makes a new one."""
    from asyncrl.launch.folder import run_folder

    take, taken = run_folder._take, []

    def late(lock: Any, of: Config) -> None:
        if not taken:
            Path(lock.name).unlink()
        taken.append(lock)
        take(lock, of)

    monkeypatch.setattr(run_folder, "_take", late)
    with locked_run_folder(config) as folder:
        assert (folder / "lock").exists()
    assert len(taken) == 2


def test_the_folder_of_a_run_that_has_not_begun_is_removed(config: Config) -> None:
    with locked_run_folder(config) as folder:
        (folder / "notes").touch()
        remove_empty(folder)
        assert (folder / "lock").exists()
        (folder / "notes").unlink()
        remove_empty(folder)
        assert not folder.exists()


def test_logs_of_an_earlier_run_are_removed_unless_it_goes_on(config: Config, tmp_path: Path) -> None:
    log = begun(config) / "logs" / "learner.log"
    log.parent.mkdir()
    log.write_text("asyncrl learner: ConfigError: of the run before")
    with claimed_run_folder(changed(tmp_path, "run.resume=true")):
        assert log.exists()
    with claimed_run_folder(changed(tmp_path)):
        assert not log.exists()


def test_a_damaged_code_file_is_named_and_does_not_end_a_resume(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = begun(config) / "code.json"
    for text in ("{", "[1]", '{"a": 1}'):
        code.write_text(text)
        with claimed_run_folder(changed(tmp_path, "run.resume=true")):
            assert f"{code} cannot be read" in capsys.readouterr().err


def test_a_resume_begins_without_the_drops_of_the_life_before(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = begun(config) / "logs" / f"generator-0{SUFFIX}"
    stale.parent.mkdir()
    stale.write_text("{}")
    monkeypatch.setattr(
        local_run.LocalRun, "run", lambda self: read_summary(stale.parent) or {"stale": stale.exists()}
    )
    assert local_run.train(changed(tmp_path, "run.resume=true")) == {"stale": False}
