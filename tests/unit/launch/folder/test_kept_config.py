"""What a run folder remembers of the configurations of its run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.folder.kept import keep_config

TEXT = "model: {path: m}\ntasks: {source: 'a:b'}\nreward: {function: 'a:b'}\n"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "mine.yaml").write_text(TEXT)
    return load_config(tmp_path / "mine.yaml")


def changed(config: Config, section: str, **values: object) -> Config:
    resumed = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
    of = dataclasses.replace(getattr(resumed, section), **values)  # type: ignore[arg-type]
    return dataclasses.replace(resumed, **{section: of})


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.yaml"))


def test_a_new_run_and_one_that_goes_on_unchanged_have_one_file(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert not keep_config(config, run)
    assert load_config(run / "config.yaml") == config
    assert not keep_config(changed(config, "queue", address="tcp://127.0.0.1:7"), run)
    assert files(run) == ["config.yaml"]
    assert capsys.readouterr().err == ""


def test_what_differs_is_said_and_the_one_before_is_kept(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    keep_config(config, run)
    (run / "checkpoints" / "v000012").mkdir(parents=True)
    more = changed(config, "run", versions=46)
    assert not keep_config(more, run)
    assert files(run) == ["config.v000012.yaml", "config.yaml"]
    assert load_config(run / "config.v000012.yaml") == config
    assert load_config(run / "config.yaml") == more
    said = capsys.readouterr().err
    assert "goes on from v000012 with run.versions: 46, not 100" in said
    assert "config.v000012.yaml is the configuration up to there" in said

    # Begun anew from the same checkpoint: what was trained in between is gone, and so may be how.
    keep_config(changed(config, "run", versions=50), run)
    assert load_config(run / "config.v000012.yaml") == config


def test_groups_of_other_rules_are_known_as_such(config: Config, tmp_path: Path) -> None:
    keep_config(config, tmp_path / "run")
    assert keep_config(changed(config, "generator", temperature=0.5), tmp_path / "run")


@pytest.mark.parametrize(
    ("section", "values", "key"),
    [
        ("tasks", {"source": "heldout.jsonl"}, "tasks.source"),
        ("run", {"seed": 1}, "run.seed"),
        ("model", {"path": "other"}, "model.path"),
    ],
)
def test_other_tasks_must_be_asked_for(
    config: Config, tmp_path: Path, section: str, values: dict[str, object], key: str
) -> None:
    run = tmp_path / "run"
    keep_config(config, run)
    other = changed(config, section, **values)
    with pytest.raises(ConfigError, match=r"was begun with .* run\.resume_changed=true") as caught:
        keep_config(other, run)
    assert caught.value.key == key
    assert load_config(run / "config.yaml") == config
    keep_config(changed(other, "run", resume_changed=True), run)
    assert files(run) == ["config.v0.yaml", "config.yaml"]


def test_a_configuration_of_another_version_of_asyncrl_is_kept_unread(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model: {gone: 1}\n")
    assert keep_config(changed(config, "run", versions=46), run)
    assert files(run) == ["config.v0.yaml", "config.yaml"]
    assert "does not take" in capsys.readouterr().err
