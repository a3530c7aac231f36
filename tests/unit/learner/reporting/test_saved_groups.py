"""Groups in files, and a step that is made again of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from learner_cases import random_group, small_config
from trainer_cases import Case, FakeQueue

from asyncrl.cli import main
from asyncrl.config.schema import CheckpointConfig, LearnerConfig, PlacementConfig, TelemetryConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, ShapingConfig
from asyncrl.config.sections.placement import PlaceConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.reporting.saved_groups import KeptGroups, load_groups, save_groups
from asyncrl.learner.retrain import retrain
from asyncrl.telemetry.sinks import read_rows
from asyncrl.types import Group


def test_groups_come_back_by_ordinal(tmp_path: Path) -> None:
    save_groups(tmp_path / "groups", map(random_group, (10, 9, 2)))
    found = [*load_groups([tmp_path / "groups", tmp_path / "groups" / "9.group"])]
    assert [group.task.ordinal for group in found] == [2, 9, 10, 9]
    assert np.array_equal(found[0].logprobs, random_group(2).logprobs)
    assert found[0].rewards.tolist() == random_group(2).rewards.tolist()


def test_groups_are_shown_of_a_run_and_a_folder_without_any_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    assert main(["groups", str(tmp_path / "run")]) == 2
    assert "holds no groups" in capsys.readouterr().err
    for version, ordinal in (("v000001", 5), ("v000002", 11)):
        save_groups(tmp_path / "run" / "groups" / version, [random_group(ordinal)])
    assert main(["groups", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert shown.index("task 5:") < shown.index("task 11:")


@pytest.mark.parametrize("content", [b"", b"no group", b"\x92\xc4\x01a\xc4\x01b", b"\x91\xa1a"])
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.group"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.group.*holds no group"):
        [*load_groups([path])]


def test_every_nth_version_is_kept_and_bad_groups_of_all(tmp_path: Path) -> None:
    kept = KeptGroups(tmp_path, 2)
    for version in (1, 2):
        kept.begin(version)
        kept.add([random_group(2 * version)])
        kept.add([random_group(2 * version + 1)])
        kept.save_bad([3])
    files = sorted(str(path.relative_to(tmp_path / "groups")) for path in tmp_path.glob("groups/*/*"))
    assert files == ["v000001/3.group", "v000002/4.group", "v000002/5.group"]


def test_a_group_that_no_queue_carries_is_named_and_keeps_no_other_from_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptGroups(tmp_path, 0)
    kept.begin(1)
    negative = replace(random_group(3), token_ids=-random_group(3).token_ids - 1)
    kept.save([negative, random_group(4)])
    assert [path.name for path in tmp_path.glob("groups/v000001/*")] == ["4.group"]
    assert "task 3 is not written" in caplog.text
    assert "1 of 2 groups that cannot be trained on are in" in caplog.text


def test_a_step_made_again_is_the_step(tmp_path: Path) -> None:
    """From the checkpoint just before it, with all its groups, and the weight of the KL that had adapted by then. Of a
    later version the policy is another."""
    adaptive = AlgorithmConfig(shaping=ShapingConfig(kl_coef=0.5, kl_target=1e-6, kl_horizon=16))
    settings = {"telemetry": TelemetryConfig(groups_every=1), "checkpoint": CheckpointConfig(every=1, keep=9)}
    config = small_config(tmp_path, **settings, algorithm=adaptive)
    case = Case(config, FakeQueue())
    case.trainer.run()
    rows = {row["version"]: row for row in read_rows(case.folder / "metrics.jsonl") if "queue/ready" in row}
    for version in (2, 3):
        began, report = retrain(config, case.folder, version)
        assert began == version - 1
        again = {name: value for name, value in report.values.items() if math.isfinite(value)}
        assert again == pytest.approx({name: rows[version][name] for name in again}, rel=1e-4, abs=1e-6)
    assert len({row["train/kl_coef"] for row in rows.values()}) > 1
    others = retrain(config, case.folder, 3, [case.folder / "groups" / "v000002"])[1]
    assert others.values != report.values


def test_a_step_cannot_be_made_again_beside_a_model_that_learns_in_a_pool(tmp_path: Path) -> None:
    place = PlacementConfig(critic=PlaceConfig(where="pool"))
    config = small_config(tmp_path, placement=place, algorithm=AlgorithmConfig(advantage="gae"))
    with pytest.raises(
        ConfigError, match=r"the critic learns in a pool.*set placement\.critic\.where=colocated"
    ):
        retrain(config, tmp_path, 1)


def test_a_step_cannot_be_made_again_of_nothing(tmp_path: Path) -> None:
    case = Case(small_config(tmp_path), FakeQueue())
    case.trainer.run()
    with pytest.raises(ConfigError, match=r"telemetry\.groups_every"):
        retrain(small_config(tmp_path), case.folder, 2)
    save_groups(case.folder / "groups" / "v000000", [random_group(0)])
    with pytest.raises(ConfigError, match="no checkpoint before it"):
        retrain(small_config(tmp_path), case.folder, 0)


def test_groups_with_numbers_that_are_not_finite_are_in_the_run_folder(tmp_path: Path) -> None:
    def make(ordinal: int) -> Group:
        group = random_group(ordinal)
        return replace(group, rewards=group.rewards * math.nan) if ordinal == 1 else group

    learner = replace(small_config(tmp_path).learner, on_bad_batch="skip")
    assert isinstance(learner, LearnerConfig)
    case = Case(small_config(tmp_path, learner=learner), FakeQueue(make=make))
    case.trainer.run()
    (bad,) = load_groups([case.folder / "groups" / "v000001"])
    assert bad.task.ordinal == 1
    assert np.isnan(bad.rewards).all()
