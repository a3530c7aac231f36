"""The search over splits, its sentence, and `asyncrl plan`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from test_calibrate import write_run

from asyncrl import cli
from asyncrl.launch.run_plan import recommended, worth
from asyncrl.sync.plan.cost_model import Speeds
from asyncrl.twin.outcome import Setup
from asyncrl.twin.plan import PlannedRun, expected_bound, fetch_times, search, splits
from asyncrl.twin.times import GenerationTimes, LearnerTimes, Lengths, StageTimes, SyncTimes

CONFIG = (
    "model: {path: m}\ntasks: {source: a:b}\nreward: {function: a:b}\n"
    "batch: {groups: 12, group_size: 2}\ngenerator: {slots: 64}\n"
)
TAILED = (
    "generation: {step_s: 0.01}\nlengths: {median: 100, sigma: 0.8, most: 800}\nlearner: {token_s: 1e-3}\n"
)
TIMES = StageTimes(
    generation=GenerationTimes(step_s=0.0, sequence_s=0.001),
    lengths=Lengths(median=100.0),
    learner=LearnerTimes(token_s=1e-3, version_s=0.0),
)
JOB = PlannedRun(
    setup=Setup(groups=12, group_size=2, slots=64),
    times=TIMES,
    speeds=Speeds(1e9, 1e9, 0.002),
    max_staleness=2,
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    config, times = tmp_path / "config.yaml", tmp_path / "times.yaml"
    config.write_text(CONFIG)
    times.write_text(TAILED)
    return str(config), str(times)


def test_splits_have_whole_generators_and_ranks_that_divide_the_groups() -> None:
    assert splits(JOB, 5) == [(4, 1), (3, 2), (2, 3), (1, 4)]
    of_two = dataclasses.replace(TIMES, generator_devices=2, rank_devices=3)
    assert splits(dataclasses.replace(JOB, times=of_two), 10) == [(3, 1), (2, 2)]
    assert splits(JOB, 1) == []
    assert splits(dataclasses.replace(JOB, rank_multiple=2), 7) == [(5, 2), (3, 4), (1, 6)]


def test_the_balanced_split_is_found() -> None:
    """On one device a version is 2.4 s of either pool."""
    found = search(JOB, 4)
    split = next(outcome.setup for outcome in found if outcome.setup.max_staleness > 0)
    assert (split.generators, split.data_ranks) == (2, 2)
    speeds = [outcome.groups_per_s for outcome in found]
    assert speeds == sorted(speeds, reverse=True)
    assert {outcome.setup.mode for outcome in found} == {"sync_colocated", "sync_split", "one_step", "async"}
    assert all(outcome.groups_per_s <= outcome.bound * 1.01 for outcome in found)


def test_equal_rollouts_on_balanced_devices_gain_nothing_from_asynchrony() -> None:
    stops = dataclasses.replace(TIMES, sync=SyncTimes(flip_s=0.6, switch_s=0.05))
    found = search(dataclasses.replace(JOB, times=stops), 2)
    assert worth(found).startswith("asynchrony will not help you: ")
    assert recommended(found).setup.max_staleness == 0


def test_a_long_tail_makes_asynchrony_pay() -> None:
    tail = dataclasses.replace(
        TIMES,
        generation=GenerationTimes(step_s=0.01, sequence_s=0.0),
        lengths=Lengths(median=100.0, sigma=1.0, most=2000.0),
    )
    found = search(dataclasses.replace(JOB, times=tail), 4)
    assert worth(found).startswith("asynchrony helps: ")
    assert recommended(found).setup.max_staleness > 0


def test_one_device_has_no_two_pools() -> None:
    found = search(JOB, 1)
    assert [outcome.setup.mode for outcome in found] == ["sync_colocated"]
    assert worth(found).startswith("asynchrony needs two pools")


def test_a_generator_gets_slots_for_its_share_of_the_groups() -> None:
    """Otherwise the first would lease all of them."""
    assert {outcome.setup.slots for outcome in search(JOB, 4) if outcome.setup.generators == 3} <= {8, 16}


def test_the_expected_bound_is_the_one_of_a_simulation() -> None:
    for outcome in search(JOB, 4):
        assert expected_bound(outcome.setup, JOB.times) == pytest.approx(outcome.bound, rel=0.1)


def test_fetches_follow_the_size_of_the_model() -> None:
    assert fetch_times(JOB, JOB.setup) is None
    big = dataclasses.replace(JOB, times=dataclasses.replace(TIMES, sync=SyncTimes(model_gb=10.0)))
    few, many = (
        fetch_times(big, dataclasses.replace(JOB.setup, generators=count, data_ranks=1)) for count in (1, 32)
    )
    assert few is not None
    assert many is not None
    assert few == pytest.approx([10.0], rel=0.01)  # 10 GB at 1 GB/s
    assert len(many) == 32
    assert max(many) > few[0]


# ---------------------------------------------------------------------- the command


def test_the_command_prints_a_table_and_keys(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config, times = files
    assert cli.main(["plan", config, "--devices", "4", "--times", times]) == 0
    head, first, *rest = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["mode", "generators", "slots"]
    assert first.startswith("async")
    assert rest[-2].startswith("asynchrony helps: ")
    assert rest[-1].startswith("keys to set: generator.count=")
    assert "queue.max_staleness=" in rest[-1]


def test_the_keys_it_prints_are_keys(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    config, times = files
    Path(config).write_text(CONFIG + "queue: {max_staleness: 1, depth: 24}\n")
    cli.main(["plan", config, "--devices", "4", "--times", times])
    keys = capsys.readouterr().out.splitlines()[-1].removeprefix("keys to set: ").split()
    assert cli.main(["config", config, "--rules-only", *keys]) == 0


def test_a_pool_that_hardly_works_is_named(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config, times = files
    cli.main(["plan", config, "--devices", "400", "--times", times])
    *_, remark, _ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"the generators would be busy \d+% of the time: try fewer --devices", remark)


def test_for_programs(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    config, times = files
    assert cli.main(["plan", config, "--devices", "4", "--times", times, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("asynchrony helps")
    assert set(found["keys"]) == {
        "generator.count",
        "learner.processes",
        "generator.slots",
        "queue.max_staleness",
    }
    best = found["outcomes"][0]
    assert best["groups_per_s"] <= best["bound_groups_per_s"] * 1.01
    assert 0 <= best["busy"]["learner"] <= 1


def test_it_names_how_busy_the_queue_would_be(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config, times = files
    words = ["plan", config, "--devices", "4", "--times", times]
    cli.main(words)
    assert "the queue" not in capsys.readouterr().out
    with Path(times).open("a") as file:
        file.write("queue: {generator_share: 0.01}\n")  # of four generators where the pools take turns
    cli.main(words)
    assert "the queue is busy 4.0% of the time at most" in capsys.readouterr().out
    cli.main([*words, "--json"])
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    assert all(each["busy"]["queue"] == pytest.approx(0.01 * each["generators"]) for each in outcomes)


def test_stage_times_of_a_run_are_kept_for_later(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, kept = write_run(tmp_path / "run"), str(tmp_path / "kept.yaml")
    assert cli.main(["plan", files[0], "--devices", "3", "--from", str(run), "--save", kept]) == 0
    from_run = capsys.readouterr().out
    assert cli.main(["plan", files[0], "--devices", "3", "--times", kept]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[0] == from_run.splitlines()[0]
    assert again.splitlines()[-1] == from_run.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "--from or --times"),
        (["--from", "a", "--times", "b"], "--from or --times"),
        (["--times", "nowhere.yaml"], "nowhere.yaml"),
        (["--from", "nowhere"], "nowhere"),
    ],
)
def test_times_come_from_one_place(
    files: tuple[str, str], words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", files[0], "--devices", "4", *words]) == 2
    assert error in capsys.readouterr().err


def test_times_of_other_parallelism_are_refused(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(files[1]).write_text("rank_devices: 4\n")
    assert cli.main(["plan", files[0], "--devices", "8", "--times", files[1]]) == 2
    assert "times.rank_devices = 4" in capsys.readouterr().err


@pytest.mark.parametrize("devices", ["0", "-1", "many"])
def test_devices_are_a_number(files: tuple[str, str], devices: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", files[0], "--devices", devices, "--times", files[1]])
    assert stopped.value.code == 2
