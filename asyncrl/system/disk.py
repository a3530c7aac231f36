"""Writing to a disk: errors name the file, and files outlive a power failure."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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


def open_to_read(path: Path) -> BinaryIO:
    """Raises OSError for what cannot be read, and for a pipe or a device, whose reader may wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no file", str(path))
    return open(descriptor, "rb")


def replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file, as UTF-8, so that it has its old content or the new one, whatever happens meanwhile. Threads,
    processes and hosts may do so at once.

    mode: its permissions, from which the umask takes some away. Raises OSError with the path and the room that is left.
    """
    partial = path.with_name(f".{path.name}.{secrets.randbits(64)}.partial")
    with writing(path):
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def remove_partials(folder: Path) -> None:
    """Remove what processes that were killed in `replace_text` have left here. No other may be writing here."""
    for partial in folder.glob(".*.partial"):
        if partial.is_file():
            partial.unlink()


def make_folder(folder: Path, *, fsync: bool = False) -> None:
    """Make a folder and those above it, unless they are there. fsync: their names outlive a power failure, also those
    that another process has just made."""
    folder.mkdir(parents=True, exist_ok=True)
    inside = folder.resolve()
    while fsync and not os.path.ismount(inside) and os.access(inside.parent, os.R_OK):
        inside = inside.parent
        sync_folder(inside)


def sync_folder(folder: Path) -> None:
    """The names in it reach the disk: those of new files, and of renamed ones."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
