"""What an error of writing says, and the names that a power failure leaves."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.system.disk import make_folder, replace_text, writing


@pytest.mark.parametrize("exists", [True, False])
def test_a_write_that_fails_names_the_file_and_the_room_that_is_left(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "journal"
    if exists:
        path.touch()
    says = rf"No space left on device \(\d+ bytes free\): '{path}'"
    with pytest.raises(OSError, match=says) as caught, writing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.errno == errno.ENOSPC


def test_an_error_that_names_a_file_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, writing(tmp_path):
        (tmp_path / "gone" / "file").open()
    assert caught.value.filename == str(tmp_path / "gone" / "file")


@pytest.mark.parametrize("fsync", [True, False])
def test_the_names_of_a_new_folder_and_of_those_above_it_reach_the_disk(
    tmp_path: Path, fsync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that were there: another process may have made them a moment ago. What lies above the folder where
    the disk is mounted is on another disk."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda of: synced.append(Path(os.readlink(f"/proc/self/fd/{of}"))))
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    (tmp_path / "runs").mkdir()
    for _ in range(2):
        make_folder(tmp_path / "runs" / "it" / "queue", fsync=fsync)
    assert (tmp_path / "runs" / "it" / "queue").is_dir()
    assert synced == 2 * [tmp_path / "runs" / "it", tmp_path / "runs", tmp_path] * fsync


def test_threads_replace_one_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has opened its file before the first has finished."""
    all_opened = threading.Barrier(3, timeout=30)
    monkeypatch.setattr(os, "fsync", lambda descriptor: all_opened.wait())
    texts = ["a" * 1000, "b" * 2000, "c" * 3000]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda text: replace_text(tmp_path / "reply", text), texts))
    assert (tmp_path / "reply").read_text() in texts
    assert os.listdir(tmp_path) == ["reply"]
