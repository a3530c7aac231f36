"""Folders for temporary files that go with their process: at once when it ends, at the next start if it was killed.

<temporary folder>/<prefix>…/lock     locked while the process lives; the kernel frees the lock however it ends
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK, UNLOCKED = "lock", "unlocked"
"""The file's name once it is locked, and before: else a process that starts in between would remove the folder."""


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder that nobody else may read. Those of this user with the same prefix whose process was killed are removed
    first."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another process removes it, or it is another user's
            _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(folder / UNLOCKED, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / UNLOCKED).rename(folder / LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    """OSError if its process lives."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)
