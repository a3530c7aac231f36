"""Epochs of a curriculum: who rests, who comes again, and the same tasks from the same file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.tasks import CurriculumConfig
from asyncrl.errors import TaskError
from asyncrl.tasks import curriculum
from asyncrl.tasks.curriculum import FILE, CurriculumStream
from asyncrl.tasks.stream import SequenceStream
from asyncrl.types import Task


@pytest.fixture(autouse=True)
def epochs_may_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum, "LEAST_TASKS", 1)


def to_task(ordinal: int, index: int, row: Any) -> Task:
    return Task(ordinal, str(row))


def opened(
    folder: Path, rows: int = 5, seed: int = 3, shuffled: bool = False, **keys: Any
) -> CurriculumStream:
    stream = SequenceStream([*range(rows)], to_task, (seed,) if shuffled else None)
    chosen = CurriculumConfig(**{"solved": 0.9, "revisit": 0.0, **keys})
    return CurriculumStream(stream, chosen, seed, folder / FILE, {"source": "numbers", "shuffle": shuffled})


def fed(folder: Path, anew: bool = True, **keys: Any) -> CurriculumStream:
    stream = opened(folder, **keys)
    stream.begin(anew)
    return stream


def prompts(stream: CurriculumStream, first: int, count: int) -> list[int]:
    return [int(str(stream.task_at(ordinal).prompt)) for ordinal in range(first, first + count)]


def test_solved_tasks_rest_and_the_others_keep_their_order(tmp_path: Path) -> None:
    stream = fed(tmp_path)
    assert prompts(stream, 0, 5) == [0, 1, 2, 3, 4]
    stream.take([(3, 1.0), (1, 0.95), (0, 0.25), (4, 0.5)])
    drawn = stream.draw()
    assert (drawn["epoch"], drawn["first"], drawn["tasks"], drawn["again"], drawn["rest"]) == (1, 5, 3, 0, 2)
    assert prompts(stream, 5, 3) == [0, 2, 4]
    assert stream.end == 8
    assert drawn["mean_of_all"] == pytest.approx((1 + 0.95 + 0.25 + 0.5) / 4)
    assert drawn["mean_of_drawn"] == pytest.approx((0.25 + 0.5) / 2), (
        "what the reward of the epoch is biased by"
    )


def test_a_task_is_judged_by_its_last_visits(tmp_path: Path) -> None:
    stream = fed(tmp_path, rows=2, visits=2)
    stream.take([(0, 1.0), (1, 0.0)])
    assert stream.draw()["rest"] == 0, "one visit is too few"
    stream.take([(2, 1.0), (3, 1.0)])
    assert stream.draw()["rest"] == 1
    assert prompts(stream, stream.end - 1, 1) == [1]
    stream.take([(stream.end - 1, 1.0)])
    assert stream.draw()["tasks"] == 1, "both are solved now, and one comes again"


def test_an_epoch_is_not_too_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum, "LEAST_TASKS", 64)
    stream = fed(tmp_path, rows=100)
    stream.take([(ordinal, 1.0) for ordinal in range(90)])
    drawn = stream.draw()
    assert (drawn["tasks"], drawn["again"], drawn["rest"]) == (64, 54, 36)
    assert {*range(90, 100)} < {*prompts(stream, 100, 64)}


def test_another_source_is_named(tmp_path: Path) -> None:
    fed(tmp_path)
    for other in (opened(tmp_path, rows=6), opened(tmp_path, seed=4), opened(tmp_path, shuffled=True)):
        with pytest.raises(TaskError, match=r"line 1: it is of {'source': 'numbers', .*take the file away"):
            other.read()


def test_a_resting_task_comes_again_and_may_be_forgotten(tmp_path: Path) -> None:
    stream = fed(tmp_path, revisit=1.0)
    stream.take([(0, 1.0)])
    assert stream.draw()["again"] == 1
    stream.take([(5, 0.0)])
    assert (stream.draw()["again"], prompts(stream, 10, 5)) == (0, [0, 1, 2, 3, 4])


def test_a_share_of_those_that_rest_comes_again_anew_each_epoch(tmp_path: Path) -> None:
    stream = fed(tmp_path, rows=400, revisit=0.25)
    stream.take([(ordinal, 1.0) for ordinal in range(300)])
    epochs = [stream.draw() for _ in range(6)]
    back = [{*prompts(stream, each["first"], each["tasks"])} - {*range(300, 400)} for each in epochs]
    assert all(50 < len(each) < 100 for each in back)
    assert back[0] != back[1]
    assert len(set.union(*back)) > 200


@given(
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 11), st.floats(0, 1)), max_size=12), max_size=6),
    visits=st.integers(1, 3),
    revisit=st.floats(0, 1),
    shuffled=st.booleans(),
    half=st.binary(max_size=5).filter(lambda some: b"\n" not in some),
)
def test_the_file_gives_the_same_tasks_again(
    rounds: list[list[tuple[int, float]]],
    visits: int,
    revisit: float,
    shuffled: bool,
    half: bytes,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """After each epoch the feeder is killed, in the middle of a row or between two."""
    folder = tmp_path_factory.mktemp("it")
    keys: dict[str, Any] = {"rows": 12, "visits": visits, "revisit": revisit, "shuffled": shuffled}
    stream = fed(folder, **keys)
    for scores in rounds:
        first = stream.end - len(stream._epochs[-1].rows)
        stream.take([(first + at, score) for at, score in scores if first + at < stream.end])
        before = stream.draw()
        expected = prompts(stream, 0, stream.end)
        assert max(Counter(expected[before["first"] :]).values()) == 1, "a task comes once in an epoch"
        with (folder / FILE).open("ab") as file:
            file.write(half)
        reader = opened(folder, **keys)
        reader.read()
        assert prompts(reader, 0, reader.end) == expected
        stream = fed(folder, anew=False, **keys)
        assert prompts(stream, 0, stream.end) == expected


def test_a_new_run_begins_with_all_tasks(tmp_path: Path) -> None:
    stream = fed(tmp_path)
    stream.take([(0, 1.0)])
    stream.draw()
    again = fed(tmp_path)
    assert again.end == 5
    again.draw()
    assert prompts(again, 5, 5) == [0, 1, 2, 3, 4]


def test_a_task_beyond_the_last_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task 5: its epoch is not drawn yet; .*has those before 5"):
        fed(tmp_path).task_at(5)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b"no row", "line 2: it is damaged"),
        (b"[]", "line 2: it is damaged"),
        (b"7", "line 2: it is damaged"),
        (b'{"epoch": 2, "first": 9}', "line 2: it is damaged"),
        (b'{"epoch": 2, "first": 9, "begin": 3, "end": []}', "line 2: it is damaged"),
        (b'{"epoch": 1, "first": 5, "begin": [], "end": []}', "line 2: it does not follow the one before"),
        (b'{"epoch": 2, "first": 10, "begin": [], "end": []}', "line 2: it does not follow the one before"),
        (b'{"epoch": 2, "first": 9, "begin": [5], "end": []}', "line 2: it does not follow the one before"),
        (b'{"epoch": 2, "first": 9, "begin": [], "end": [1]}', "line 2: it does not follow the one before"),
        (
            b'{"about": {"source": "letters"}}',
            "line 2: it is of {'source': 'letters'}, and not of .*'rows': 5",
        ),
        (b'{"scores": [[0]]}', "line 2: it is damaged"),
    ],
)
def test_a_file_that_this_run_cannot_have_written_is_refused(tmp_path: Path, line: bytes, wrong: str) -> None:
    (tmp_path / FILE).write_bytes(b'{"epoch": 1, "first": 5, "begin": [2], "end": []}\n' + line + b"\n")
    with pytest.raises(TaskError, match=wrong):
        opened(tmp_path).read()
