"""Temporary folders of processes that live, that end, and that are killed."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
from pathlib import Path

import pytest

from asyncrl.system.temporary import temporary_folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def killed_inside() -> None:
    """A process that makes a folder with a file, and is killed."""
    pid = os.fork()
    if pid == 0:
        with temporary_folder("mine-") as folder:
            (folder / "file").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_that_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_inside()
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with temporary_folder("mine-"):
        assert len(list(tmp_path.glob("mine-*/file"))) == 1


def test_that_of_a_killed_process_goes_at_the_next_start_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "mine-without-a-lock").mkdir()
    (tmp_path / "other-1").mkdir()
    killed_inside()
    assert len(list(tmp_path.glob("mine-*/file"))) == 1
    with temporary_folder("mine-") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        with temporary_folder("mine-") as second:
            assert {path.name for path in tmp_path.iterdir()} == {
                "mine-without-a-lock",
                "other-1",
                folder.name,
                second.name,
            }
    assert {path.name for path in tmp_path.iterdir()} == {"mine-without-a-lock", "other-1"}


def test_a_folder_stays_if_another_process_starts_before_it_is_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flock = fcntl.flock

    def meanwhile(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        with temporary_folder("mine-"):
            flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with temporary_folder("mine-") as folder:
        assert folder.is_dir()
