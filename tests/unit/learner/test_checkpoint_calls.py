"""A learner that dies, or whose disk is full, at any call to the disk by which it saves and prunes checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_calls import FULL, KILL, TORN, Watch, watched
from trainer_cases import checkpoints_of

from asyncrl.learner.checkpoint import Checkpoints, Meta, of_version, to_resume
from asyncrl.system.disk import writing

VERSIONS, KEPT = range(1, 5), 2


class NumberBackend:
    """Of one rank. Its tensors are the version, in two files."""

    rank = 0

    def __init__(self) -> None:
        self.version = 0

    def exchange(self, value: object) -> list[object]:
        return [value]

    def save(self, folder: Path) -> None:
        folder.mkdir()
        for name in ("policy", "critic"):
            with writing(folder / name):
                (folder / name).write_text(str(self.version))


def saved_one_by_one(run: Path, versions: range, report: Callable[[str], None]) -> None:
    """A line for each version of which the queue is told."""
    backend = NumberBackend()
    checkpoints: Checkpoints = checkpoints_of(run, backend, fsync=True, keep=KEPT, asynchronous=False)
    for backend.version in versions:
        checkpoints.begin(Meta(backend.version, b"train", None))
        report(f"saved {checkpoints.finish()}")


def whole_versions(run: Path) -> list[int]:
    """Every checkpoint that has a checkpoint's name is whole, and no other version has any."""
    found = [int(path.name[1:]) for path in sorted(run.glob("checkpoints/v*"))]
    for version in found:
        folder = of_version(run, version)
        assert [(folder / "learner" / name).read_text() for name in ("policy", "critic")] == [
            str(version)
        ] * 2
    return found


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", [KILL, TORN, FULL])
def test_what_the_queue_was_told_of_is_there_and_whole(tmp_path: Path, fault: str, every: int) -> None:
    for at in itertools.count(step=every):
        home = tmp_path / str(at)
        (home / "notes").mkdir(parents=True)
        run = home / "it"
        watch = Watch(str(run), str(home / "notes"), fault=fault, at=at)
        code, reports = watched(lambda report, run=run: saved_one_by_one(run, VERSIONS, report), watch)
        if not watch.struck.exists():
            break
        where = f"{fault} at {watch.calls()[at]}, call {at}"
        told = [int(line.removeprefix("saved ")) for line in reports if line.startswith("saved ")]
        if fault == FULL:
            assert code in (0, 28), where
            assert code == 0 or (str(run) in reports[-1] and "No space left" in reports[-1]), (where, reports)
        else:
            assert code == -9, where
        whole = whole_versions(run)
        found = to_resume(run, set_aside=True)
        newest = found[1].version if found else 0
        assert newest in (len(told), len(told) + 1), where
        assert whole[-KEPT:] == [version for version in (newest - 1, newest) if version > 0], where
        first = newest + 1
        saved_one_by_one(run, range(first, first + 2), lambda line: None)
        assert whole_versions(run) == [first, first + 1], where
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
            f"v{version:06d}" for version in (first, first + 1)
        ]
    assert at > 40
