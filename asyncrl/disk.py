"""Writing to a disk: errors that say where, and what outlives a power failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError from inside names `path`, unless it names a file, and how much room is left there: the system's own
    names none when a write, not an open, fails."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        free = shutil.disk_usage(path if path.exists() else path.parent).free
        raise OSError(error.errno, f"{error.strerror or error} ({free} bytes free)", str(path)) from error


def sync_folder(folder: Path) -> None:
    """The names in it reach the disk: those of new files, and of renamed ones."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
