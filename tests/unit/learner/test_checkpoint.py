"""Checkpoints that are written beside what goes on: whole or not there, one at a time, failures by name."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
from learner_cases import small_config
from learner_fakes import FakeBackend, Meeting
from trainer_cases import Case, FakeQueue, checkpoints_of, newest

from asyncrl.config.schema import CheckpointConfig, Config
from asyncrl.errors import ConfigError, DeadlineError, TrainingError
from asyncrl.learner.checkpoint import (
    FAILED,
    WRITING,
    WRITTEN,
    Checkpoints,
    Meta,
    read_meta,
    require_one_folder,
    to_resume,
)

FULL = OSError(errno.ENOSPC, "No space left on device")


@dataclass
class Disk:
    """A backend of one rank of `world`, whose tensors are one number and whose writes last until `free` is set."""

    rank: int = 0
    others: list[str] = field(default_factory=list)  # what the other ranks say of their writers
    live: int = 0
    free: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def exchange(self, value: Any) -> list[Any]:
        return [value, *self.others]

    def save(self, folder: Path) -> None:
        self._write(folder, self.live)

    def copy_state(self) -> Callable[[Path], None]:
        copy = self.live
        return lambda folder: self._write(folder, copy)

    def _write(self, folder: Path, value: int) -> None:
        assert self.free.wait(60)
        folder.mkdir()
        if self.error is not None:
            raise self.error
        (folder / "value").write_text(str(value))


def meta(version: int) -> Meta:
    return Meta(version, b"train", b"eval")


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_is_saved_is_what_was_there_when_it_began(tmp_path: Path) -> None:
    disk = Disk(live=7)
    checkpoints = checkpoints_of(tmp_path, disk)
    checkpoints.begin(meta(3))
    disk.live = 8
    assert checkpoints.state == WRITING
    assert checkpoints.settle([WRITING]) is None
    assert newest(tmp_path) is None
    disk.free.set()
    assert checkpoints.finish() == 3
    assert saved(tmp_path) == ["v000003"]
    whole = newest(tmp_path)
    assert whole is not None
    assert (whole / "learner" / "value").read_text() == "7"
    assert read_meta(whole) == meta(3)
    assert checkpoints.finish() is None


def test_a_checkpoint_is_whole_only_when_all_ranks_have_written(tmp_path: Path) -> None:
    disk = Disk(others=[WRITING])
    disk.free.set()
    checkpoints = checkpoints_of(tmp_path, disk, deadline_s=1e-3)
    checkpoints.begin(meta(3))
    assert checkpoints.settle([WRITTEN, WRITING]) is None
    with pytest.raises(
        DeadlineError, match=r"learner rank 0 waited .* for the disk .*: checkpoint 3 did not come"
    ):
        checkpoints.finish()
    assert newest(tmp_path) is None
    assert checkpoints.settle([WRITTEN, WRITTEN]) == 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_leaves_the_older_one(tmp_path: Path, asynchronous: bool) -> None:
    disk = Disk()
    disk.free.set()
    checkpoints = checkpoints_of(tmp_path, disk, asynchronous=asynchronous)
    checkpoints.begin(meta(3))
    checkpoints.finish()
    disk.error = FULL
    checkpoints.begin(meta(4))
    with pytest.raises(OSError, match="No space left"):
        checkpoints.finish()
    assert saved(tmp_path) == ["v000003"]


def test_a_full_disk_of_another_rank_is_an_error_here_too(tmp_path: Path) -> None:
    disk = Disk(others=[FAILED])
    disk.free.set()
    checkpoints = checkpoints_of(tmp_path, disk)
    checkpoints.begin(meta(3))
    with pytest.raises(OSError, match="another rank could not write"):
        checkpoints.finish()
    assert saved(tmp_path) == []


def with_checkpoints(folder: Path, *versions: int, **settings: Any) -> Checkpoints:
    disk = Disk()
    disk.free.set()
    checkpoints = checkpoints_of(folder, disk, **settings)
    for version in versions:
        checkpoints.begin(meta(version))
        checkpoints.finish()
    return checkpoints


def tear(folder: Path, version: int, keep: int) -> Path:
    torn = folder / "checkpoints" / f"v{version:06d}"
    content = (torn / "meta.msgpack").read_bytes()
    (torn / "meta.msgpack").write_bytes(content[:keep])
    return torn


@pytest.mark.parametrize("left", [0, 20])
def test_a_torn_one_is_passed_over_for_the_one_before(
    tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = with_checkpoints(tmp_path, 3, 4, keep=2)
    torn = tear(tmp_path, 4, left)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ConfigError, match=r"v000004.*torn.*remove this folder"),
    ):
        read_meta(torn)
    assert to_resume(tmp_path) == (tmp_path / "checkpoints" / "v000003", meta(3))
    assert f"{torn} is torn (meta.msgpack): going on from v000003" in caplog.text
    assert to_resume(tmp_path, set_aside=True) == (tmp_path / "checkpoints" / "v000003", meta(3))
    assert saved(tmp_path) == ["torn-v000004", "v000003"]
    for version in (4, 5):  # it is none of those that are kept
        checkpoints.begin(meta(version))
        checkpoints.finish()
    assert saved(tmp_path) == ["torn-v000004", "v000004", "v000005"]


def test_a_torn_one_alone_and_one_of_a_newer_format_are_refused_by_name(tmp_path: Path) -> None:
    assert to_resume(tmp_path) is None
    with_checkpoints(tmp_path, 3, 4)
    newer = msgpack.packb({"version": 4, "format": 3, "what": "nobody knows yet"})
    (tmp_path / "checkpoints" / "v000004" / "meta.msgpack").write_bytes(newer)
    with pytest.raises(ConfigError, match=r"run\.resume = .*v000004.*format 3.*the asyncrl that wrote it"):
        to_resume(tmp_path)
    for version in (3, 4):
        tear(tmp_path, version, 5)
    with pytest.raises(ConfigError, match=r"v000004.*torn"):
        to_resume(tmp_path, set_aside=True)
    assert saved(tmp_path) == ["v000003", "v000004"]


@pytest.mark.parametrize("fsync", [True, False])
def test_what_the_queue_hears_of_is_on_the_disk(
    tmp_path: Path, fsync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order: the way to the folder, meta, the folders inside, the partial folder, its new name."""
    synced: list[str] = []
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    monkeypatch.setattr(os, "fsync", lambda of: synced.append(Path(os.readlink(f"/proc/self/fd/{of}")).name))
    disk = Disk()
    disk.free.set()
    checkpoints = checkpoints_of(tmp_path, disk, fsync=fsync)
    checkpoints.begin(meta(3))
    checkpoints.finish()
    whole = [tmp_path.name, "meta.msgpack", "learner", ".v000003.partial", "checkpoints"]
    assert synced == (whole if fsync else [])


def test_leftovers_of_a_killed_process_go_and_the_oldest_are_pruned(tmp_path: Path) -> None:
    for left in (".v000001.partial", ".v000009.replaced", "v000001", "v000002", "notes"):
        (tmp_path / "checkpoints" / left).mkdir(parents=True)
    disk = Disk()
    disk.free.set()
    checkpoints = checkpoints_of(tmp_path, disk, keep=2)
    checkpoints.begin(meta(3))
    checkpoints.finish()
    assert saved(tmp_path) == ["notes", "v000002", "v000003"]


class KilledError(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("place", range(8))
def test_a_kill_between_two_changes_of_the_folder_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Version 3 is there already and is made again, with keep=1: at no place is there none. The next run ends with
    version 4 alone."""
    disk = Disk(live=1)
    disk.free.set()
    checkpoints = checkpoints_of(tmp_path, disk, keep=1, asynchronous=False)
    checkpoints.begin(meta(3))
    checkpoints.finish()
    calls = []

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            calls.append(change)
            if len(calls) > place:
                raise KilledError
            return change(*args, **options)

        return changed

    disk.live = 2
    with monkeypatch.context() as patch:
        for module, name in ((os, "replace"), (os, "unlink"), (os, "rmdir")):
            patch.setattr(module, name, dying(getattr(module, name)))
        with contextlib.suppress(KilledError):
            checkpoints.begin(meta(3))
            checkpoints.finish()
    found = to_resume(tmp_path)
    assert found is not None
    assert found[1].version == 3
    assert (found[0] / "learner" / "value").read_text() in "12"
    disk.live = 3
    after = checkpoints_of(tmp_path, disk, keep=1, asynchronous=False)
    after.begin(meta(4))
    assert to_resume(tmp_path) is not None
    after.finish()
    assert saved(tmp_path) == ["v000004"]


def test_another_rank_than_the_first_renames_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".v000003.partial").mkdir(parents=True)
    disk = Disk(rank=1)
    disk.free.set()
    checkpoints = checkpoints_of(tmp_path, disk)
    checkpoints.begin(meta(3))
    assert checkpoints.finish() == 3
    assert saved(tmp_path) == [".v000003.partial"]
    assert not (tmp_path / "checkpoints" / ".v000003.partial" / "meta.msgpack").exists()


# ---------------------------------------------------------------------- with the trainer


def every_version(folder: Path, **settings: Any) -> Config:
    return small_config(folder, checkpoint=CheckpointConfig(every=1, **settings))


def slowed(case: Case, until: Callable[[], None]) -> None:
    """Writes of the backend call `until` first."""
    copy_state = case.backend.copy_state

    def slow() -> Callable[[Path], None]:
        write = copy_state()
        return lambda folder: (until(), write(folder))[1]  # type: ignore[func-returns-value]

    case.backend.copy_state = slow  # type: ignore[method-assign]


def test_the_next_version_trains_while_the_disk_is_busy(tmp_path: Path) -> None:
    """The disk takes checkpoint 1 only once version 2 is being trained."""
    queue, claimed = FakeQueue(), threading.Event()
    case = Case(every_version(tmp_path), queue)
    queue.on_claim = lambda step, index: claimed.set() if (step, index) == (1, 1) else None
    slowed(case, lambda: None if claimed.wait(60) else pytest.fail("version 2 waits for checkpoint 1"))
    case.trainer.run()
    assert queue.of("checkpointed") == [("train", 1), ("train", 2), ("train", 3)]
    calls = [name for name, _ in queue.calls if name in ("trained", "checkpointed")]
    assert calls[:2] == ["trained", "trained"]
    assert calls.count("checkpointed") == 3
    assert all(
        "perf/time/wait/checkpoint" in row
        for row in case.rows
        if row.get("version") in (2, 3) and "perf/step_s" in row
    )


def test_without_asynchronous_each_is_whole_before_the_next_step(tmp_path: Path) -> None:
    queue = FakeQueue()
    Case(every_version(tmp_path, asynchronous=False), queue).trainer.run()
    calls = [name for name, _ in queue.calls if name in ("trained", "checkpointed")]
    assert calls == ["trained", "checkpointed"] * 3


def test_the_end_waits_no_longer_than_its_deadline(tmp_path: Path) -> None:
    never = threading.Event()
    case = Case(every_version(tmp_path, deadline_s=0.01), FakeQueue())
    slowed(case, lambda: never.wait(60) and None)
    with pytest.raises(DeadlineError, match="the disk under"):
        case.trainer.run()
    never.set()
    assert newest(case.folder) is None


def test_an_error_of_training_loses_no_checkpoint_under_way(tmp_path: Path) -> None:
    queue, wrong = FakeQueue(), threading.Event()
    case = Case(every_version(tmp_path), queue)
    slowed(case, lambda: wrong.wait(60) and None)

    def fail(step: int, index: int) -> None:
        if step == 1:
            wrong.set()
            raise TrainingError("made up")

    queue.on_claim = fail
    with pytest.raises(TrainingError, match="made up"):
        case.trainer.run()
    whole = newest(case.folder)
    assert whole is not None
    assert read_meta(whole).version == 1


def test_a_disk_that_fills_up_ends_the_run_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    writes: list[int] = []

    def fill_up() -> None:
        writes.append(1)
        if len(writes) == 2:
            raise FULL

    case = Case(every_version(tmp_path), FakeQueue())
    slowed(case, fill_up)
    with pytest.raises(OSError, match="No space left"):
        case.trainer.run()
    assert saved(case.folder) == ["v000001"]


def refusals(*folders: Path) -> list[str]:
    """The error of each rank, in order, where every rank has its own run folder; empty where there is none."""
    meeting = Meeting(len(folders))

    def refusal(rank: int) -> str:
        try:
            require_one_folder(folders[rank], FakeBackend(rank=rank, meeting=meeting))
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(refusal, range(len(folders))))


def test_ranks_that_do_not_share_the_run_folder_are_refused_on_every_machine(tmp_path: Path) -> None:
    """Each would write its part of a checkpoint elsewhere, and no checkpoint could be read again."""
    here, there = tmp_path / "here" / "it", tmp_path / "there" / "it"
    assert refusals(here, here, here) == ["", "", ""]
    folders = [here, there, here, there]
    for folder, error in zip(folders, refusals(*folders), strict=True):
        assert error.startswith(f"run.dir = '{folder.parent}': learner rank 1, 3 ")
        assert "Remedy: " in error
    assert list(here.iterdir()) == []


def test_a_learner_of_one_rank_writes_nothing_to_find_that_out(tmp_path: Path) -> None:
    assert refusals(tmp_path / "it") == [""]
    assert not (tmp_path / "it").exists()


class PoolElsewhere:
    """A model whose pool saves, and does not see this run folder."""

    name = "critic"

    def save(self, folder: Path) -> Callable[[], None]:
        return lambda: None


def test_a_checkpoint_without_the_part_of_a_pool_is_not_kept(tmp_path: Path) -> None:
    disk = Disk()
    disk.free.set()
    checkpoints = checkpoints_of(tmp_path, disk, remote_models=[PoolElsewhere()])
    checkpoints.begin(meta(3))
    with pytest.raises(ConfigError, match=r"run\.dir = .*the pool of the critic has written .* elsewhere"):
        checkpoints.finish()
    assert saved(tmp_path) == []


def test_the_trace_has_the_writing_and_when_it_was_whole(tmp_path: Path, trace: Callable[[], Any]) -> None:
    disk = Disk()
    checkpoints = checkpoints_of(tmp_path / "run", disk)
    checkpoints.begin(meta(3))
    disk.free.set()
    checkpoints.finish()
    ((span,), (event,)) = trace().lanes["disk"].spans, trace().events
    assert (span.name, span.about) == ("checkpoint", {"version": 3})
    assert (event.name, event.about) == ("checkpoint", {"version": 3})
    assert span.start <= span.end <= event.time
