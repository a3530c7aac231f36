"""The search of keys by simulation, its reasons, and its words."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.bench import tune as tuning
from asyncrl.bench.report import Ratio
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.sync.plan.cost_model import Speeds
from asyncrl.twin.outcome import Setup, Simulated
from asyncrl.twin.plan import PlannedRun
from asyncrl.twin.times import GenerationTimes, LearnerTimes, Lengths, StageTimes
from asyncrl.twin.tune import LEAST_GAIN, Change, named_waits, tune

LONG_TAIL = StageTimes(
    generation=GenerationTimes(step_s=0.01, sequence_s=0.0001),
    lengths=Lengths(median=100.0, sigma=1.0, most=800),
    learner=LearnerTimes(token_s=1e-4, version_s=0.0),
)


def job_of(times: StageTimes = LONG_TAIL, **setup: Any) -> PlannedRun:
    given = Setup(groups=12, group_size=2, slots=24, max_staleness=0)
    return PlannedRun(
        setup=replace(given, **setup), times=times, speeds=Speeds(1e9, 1e9, 0.002), max_staleness=2
    )


@cache
def long_tail() -> tuple[Simulated, list[Change]]:
    return tune(job_of())


def test_a_long_tail_wants_staleness_and_the_reason_is_the_wait_for_groups() -> None:
    best, changes = long_tail()
    assert best.setup.max_staleness >= 1
    (first, *_) = [change for change in changes if "max_staleness" in change.fields]
    assert first.gain >= LEAST_GAIN
    assert first.reason().startswith("learner waits for groups ")
    product = 1.0
    for change in changes:
        product *= change.gain
    assert product == pytest.approx(best.tokens_per_s / changes[0].before.tokens_per_s)


def test_a_learner_that_is_always_busy_gains_nothing_from_staleness() -> None:
    """Data is made in no time; so the youngest of all will do."""
    slow = replace(LONG_TAIL, learner=LearnerTimes(token_s=1.0), generation=GenerationTimes(1e-6, 0.0))
    best, changes = tune(job_of(slow, max_staleness=4))
    assert best.setup.max_staleness == 0
    assert [dict(change.fields) for change in changes] == [{"max_staleness": 0}]


def test_devices_go_to_the_pool_that_the_other_waits_for() -> None:
    learner = LearnerTimes(token_s=4e-3, version_s=0.0)
    best, changes = tune(
        job_of(replace(LONG_TAIL, learner=learner), generators=4, max_staleness=2), devices=5
    )
    assert best.setup.data_ranks > 1
    assert best.setup.generators + best.setup.data_ranks == 5
    assert changes[0].fields.keys() == {"generators", "data_ranks"}
    kept, _ = tune(job_of(replace(LONG_TAIL, learner=learner), generators=4, max_staleness=2))
    assert (kept.setup.generators, kept.setup.data_ranks) == (4, 1)


def test_slots_stay_large_enough_for_a_group() -> None:
    """Each sequence makes all others slower, so that few of them are fastest."""
    slow = replace(LONG_TAIL, generation=GenerationTimes(step_s=0.0, sequence_s=0.01))
    best, _ = tune(job_of(slow, slots=4, max_staleness=2))
    assert best.setup.slots >= best.setup.group_size


def test_waits_are_named_as_in_the_rows() -> None:
    best, _ = long_tail()
    assert "groups" in named_waits(best, "learner")


CONFIG = (
    "model: {path: m}\ntasks: {source: a:b}\nreward: {function: a:b}\nbatch: {groups: 12, group_size: 2}\n"
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return str(file)


def tuned(ratio: Ratio | None) -> tuning.Tuning:
    best, changes = long_tail()
    keys = {"queue.max_staleness": best.setup.max_staleness, "queue.depth": None}
    return tuning.Tuning(keys, changes, best, ratio)


def test_the_written_configuration_is_the_given_one_with_the_keys(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tuned(Ratio(1.4, 1.2, 1.6))
    tuning.print_tuning(found, tmp_path / "tuned.yaml", path)
    printed = capsys.readouterr().out
    assert "measured: 1.40 × the throughput of the given keys (1.20 to 1.60, 95 %)\n" in printed
    assert f"queue.max_staleness={found.keys['queue.max_staleness']} queue.depth=null" in printed
    config = load_config(str(tmp_path / "tuned.yaml"))
    assert (config.queue.max_staleness, config.queue.depth) == (found.keys["queue.max_staleness"], None)
    assert config.batch.groups == 12
    assert yaml.safe_load((tmp_path / "tuned.yaml").read_text())["include"] == [path]


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Ratio(1.1, 0.9, 1.3), "not certain to be faster"),
        (Ratio(1.1, None, None), "in one repetition"),
        (None, "not measured"),
    ],
)
def test_a_difference_that_is_not_certain_is_called_so(
    path: str, ratio: Ratio | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning.print_tuning(tuned(ratio), None, path)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("ratio", [Ratio(0.8, 0.7, 0.9), Ratio(0.8, None, None)])
def test_keys_that_were_measured_to_be_slower_are_not_set(
    path: str, ratio: Ratio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning.print_tuning(tuned(ratio), tmp_path / "tuned.yaml", path)
    printed = capsys.readouterr().out
    assert printed.endswith("nothing to set: keep the given keys\n")
    assert "keys to set" not in printed
    assert not (tmp_path / "tuned.yaml").exists()


@pytest.mark.parametrize("split", [False, True])
def test_nothing_to_set_names_the_keys_that_were_tried(
    path: str, split: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    best, _ = long_tail()
    tuning.print_tuning(tuning.Tuning({}, [], best, None, split), None, path)
    printed = capsys.readouterr().out
    assert printed.startswith("nothing to set: no value of ")
    assert ("generator.count, learner.processes" in printed) == split


def test_a_synchronous_run_that_has_nothing_to_set_needs_no_asynchrony(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    best, _ = long_tail()
    best = replace(best, setup=replace(best.setup, max_staleness=0))
    tuning.print_tuning(tuning.Tuning({}, [], best, None), None, path)
    assert capsys.readouterr().out.startswith("asynchrony will not help you")


def test_too_few_versions_are_refused_before_any_run(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--versions"):
        tuning.run_tuning(path, [], tmp_path, 3, 1, None)


def test_a_change_without_waits_has_words_too() -> None:
    best, _ = long_tail()
    quiet = replace(best, generators={"compute": 1.0}, learner={"compute": 1.0})
    assert Change({}, quiet, quiet).reason() == "neither pool waits"
