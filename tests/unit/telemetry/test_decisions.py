"""The files of decisions: what is written is read, whoever is killed in between."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry import decisions
from asyncrl.telemetry.decisions import SUFFIX, ClaimedGroup, DecisionLog, TrainedVersion, read_lives

ABOUT = {"format": decisions.FORMAT, "role": "generator", "config": "config.yaml"}

NUMBER = st.integers(0, 1 << 40)
NAMES = st.lists(NUMBER, min_size=1, max_size=5).flatmap(
    lambda numbers: st.sampled_from(["train", "eval", "probe", "other", "train/greedy"]).map(
        lambda stream: "/".join([stream, *map(str, numbers)])
    )
)
EVENTS = st.one_of(
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.just("add"), NAMES),
    st.tuples(st.just("weights"), NUMBER, NUMBER),
    st.tuples(st.just("flip"), st.booleans()),
    st.tuples(st.just("kept"), NAMES, st.lists(st.binary(max_size=9), max_size=2)),
)


def written(folder: Path, events: list[Any], process: str = "generator-0") -> Path:
    log = DecisionLog(folder, process, ABOUT)
    for kind, *values in events:
        if kind == "step":
            log.step(*values)
        elif kind == "add":
            log.joined(*values)
        else:
            log.note(kind, *values)
    log.close()
    return max(folder.glob(f"{process}.*{SUFFIX}"))


def told(events: list[Any]) -> list[tuple[Any, ...]]:
    """Steps of one kind that follow one another are one item."""
    items: list[tuple[Any, ...]] = []
    for event in events:
        if event[0] != "step":
            items.append(event)
        elif items and items[-1][0] == "step" and items[-1][2] == event[1]:
            items[-1] = ("step", items[-1][1] + 1, event[1])
        else:
            items.append(("step", 1, event[1]))
    return items


@given(st.lists(EVENTS, max_size=12), st.data())
def test_a_kill_costs_the_end_of_a_file_alone(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("run") / "decisions"
    path = written(folder, events)
    (life,) = read_lives(folder)
    assert (life.process, life.number, dict(life.about)) == ("generator-0", 0, ABOUT)
    assert list(life.items) == told(events)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for cut in read_lives(folder):  # none, if not even the map is left
        assert list(cut.items) == told(events)[: len(cut.items)]


def test_a_groups_request_and_its_step_take_four_bytes(tmp_path: Path) -> None:
    groups = 1000
    events = [event for n in range(groups) for event in (("add", f"train/{n}/{n + 3}"), ("step", True))]
    assert len(written(tmp_path, events).read_bytes()) < 4 * groups + 100


@given(
    st.lists(st.lists(st.builds(ClaimedGroup, NUMBER, st.integers(0, 0xFFFF)), max_size=4), max_size=4),
    st.booleans(),
    st.integers(0, (1 << 64) - 1),
    st.floats(allow_nan=False),
)
def test_a_step_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    claims: list[list[ClaimedGroup]],
    refused: bool,
    weights: int,
    norm: float,
) -> None:
    step = TrainedVersion(7, refused, weights, norm, claims)
    folder = tmp_path_factory.mktemp("run")
    written(folder, [tuple(step.to_wire())])
    assert TrainedVersion.from_wire(read_lives(folder)[0].items[0]) == step


def test_each_life_of_a_process_has_a_file_that_its_owner_alone_may_read(tmp_path: Path) -> None:
    for lives in range(3):
        path = written(tmp_path, [("flip", bool(lives))])
        assert path.stat().st_mode & 0o777 == 0o600
    written(tmp_path, [], "generator-1")
    assert [life.name for life in read_lives(tmp_path)] == [
        "generator-0.0",
        "generator-0.1",
        "generator-0.2",
        "generator-1.0",
    ]


def test_nothing_is_in_the_file_before_a_flush_and_all_is_after_it(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path, "generator-0", ABOUT)
    log.step(True)
    log.joined("train/1/1")
    log.step(True)
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == b""
    log.flush()
    assert [item[0] for item in read_lives(tmp_path)[0].items] == ["step", "add", "step"]
    log.close()


def test_a_long_wait_for_a_flush_takes_little_memory(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path, "generator-0", ABOUT)
    for number in range(30_000):
        log.joined(f"train/{number}/{number}")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size >= decisions.MOST_BUFFERED
    log.close()
    assert len(read_lives(tmp_path)[0].items) == 30_000


def test_a_full_disk_ends_the_file_with_one_warning_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_file: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with decisions.recording(tmp_path, "generator-0", ABOUT):
        decisions.joined("train/1/1")
        decisions.flush()
        monkeypatch.setattr(decisions, "holding_write", full)
        for number in range(3):
            decisions.joined(f"train/{number}/1")
            decisions.flush()
    assert len(read_lives(tmp_path)[0].items) == 1
    assert caplog.text.count("cannot be replayed") == 1


def test_a_folder_that_cannot_be_made_costs_the_decisions_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with decisions.recording(tmp_path / "file", "generator-0", ABOUT):
        assert not decisions.recorded()
        decisions.note("flip", True)
        decisions.flush()
    assert caplog.text.count("cannot be replayed") == 1


def test_without_a_recording_nothing_is_written() -> None:
    assert not decisions.recorded()
    decisions.step(True)
    decisions.joined("train/1/1")
    decisions.flush()


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    with decisions.recording(tmp_path, "generator-0", ABOUT):
        child = os.fork()
        if child == 0:
            decisions.note("flip", True)
            decisions.flush()
            os._exit(int(decisions.recorded()))
        assert os.waitpid(child, 0)[1] == 0
    assert read_lives(tmp_path)[0].items == []


def test_two_threads_lose_no_item(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path, "generator-0", ABOUT)

    def steps() -> None:
        for _ in range(2000):
            log.step(True)

    def notes() -> None:
        for number in range(500):
            log.note("weights", 1, number)
            log.flush()

    threads = [threading.Thread(target=work) for work in (steps, notes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    items = read_lives(tmp_path)[0].items
    assert sum(item[1] for item in items if item[0] == "step") == 2000
    assert [item[2] for item in items if item[0] == "weights"] == list(range(500))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ([1, 2, 3], r"generator-0\.0 does not begin with a map"),
        (ABOUT, r"generator-0\.0 has an unknown item: \['flip'\]"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, data: Any, error: str) -> None:
    path = tmp_path / f"generator-0.0{SUFFIX}"
    path.write_bytes(msgpack.packb(data) + msgpack.packb(["flip"]))
    with pytest.raises(ValueError, match=error):
        read_lives(tmp_path)


def test_a_process_that_was_killed_at_its_start_has_no_life(tmp_path: Path) -> None:
    DecisionLog(tmp_path, "generator-0", ABOUT)
    assert read_lives(tmp_path) == []
