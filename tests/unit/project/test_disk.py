"""What an error of writing says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from asyncrl.system.disk import writing


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
