"""The journal as a file of the run folder.

    file    b"ARLJ" · version byte · batch 0 (the header) · batch 1 · …
    batch   mark · bytes of the body · crc32 of number and body · number · body (see journal.join)

A broker that is killed while it writes leaves a torn tail, which is cut off: nobody was answered on the strength of
it. A bad batch with a good one behind it is damage, and is refused. `lock`, beside the file, keeps a second broker
out while the first lives; the kernel frees it when the process ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import JournalError
from asyncrl.queue.storage.journal import LEAST_OVERGROWN, Growth, Header, batches, join, split
from asyncrl.system.disk import make_folder, sync_folder, writing

log = logging.getLogger(__name__)

MAGIC = b"ARLJ\x01"
MARK = b"\xa5BAT"
HEAD = struct.Struct("<4sIIQ")
NUMBER = struct.Struct("<Q")


class FileJournal:
    """schema, before: as in Header. `outdated`: the journal has the schema before; compact it before you append.

    fsync: every flush reaches the disk and survives a power failure, not only the end of the process.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        schema: str = "",
        before: str | None = None,
        *,
        fsync: bool = False,
        least_overgrown: int = LEAST_OVERGROWN,
    ) -> None:
        self._path, self._fsync = folder / "journal", fsync
        self._header = Header(run, schema, before)
        self.outdated = False
        self._growth = Growth(least_overgrown)
        self._buffer: list[bytes] = []
        self._number = 0
        self._file = -1
        make_folder(folder, fsync=fsync)
        self._lock = _locked(folder / "lock")
        if not self._path.exists():
            self.compact(())

    def replay(self) -> Iterator[bytes]:
        packed = self._path.read_bytes()
        if not packed.startswith(MAGIC):
            raise JournalError(f"{self._path} is no journal of this version: begins with {packed[:5]!r}")
        found = _batches_of(packed, len(MAGIC), first=0)
        at, header = next(found, (len(MAGIC), None))
        self._check(header)
        number = 1
        for at, body in found:  # noqa: B007  (where the last good batch ends)
            yield from split(body)
            number += 1
        if _good_batch_after(packed, at, number):
            raise JournalError(f"{self._path} is damaged at byte {at}: there are good records behind it")
        if at < len(packed):
            log.warning("%s: a torn tail of %d bytes was cut off", self._path, len(packed) - at)
        self._let_go()
        self._file = os.open(self._path, os.O_WRONLY)
        os.ftruncate(self._file, at)
        os.lseek(self._file, at, os.SEEK_SET)
        self._number = number
        self._growth.add(at)

    def append(self, record: bytes) -> None:
        self._buffer.append(record)

    def flush(self) -> None:
        if self._buffer:
            assert self._file >= 0, "a journal is replayed before it is written"
            self._write(join(self._buffer))
            self._buffer = []

    def compact(self, records: Iterable[bytes]) -> None:
        """In a new file that takes the old one's name."""
        self._buffer = []
        partial = self._path.with_suffix(".partial")
        self._let_go()
        self._file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with writing(partial):
            _write_all(self._file, MAGIC)
        self._number = 0
        self._growth.snapshot(len(MAGIC))
        for body in (join([self._header.packed]), *batches(records)):
            self._write(body)
        os.replace(partial, self._path)
        if self._fsync:
            sync_folder(self._path.parent)
        self.outdated = False
        self._growth.snapshot(self._growth.size)

    @property
    def overgrown(self) -> bool:
        return self._growth.over

    def close(self) -> None:
        if self._lock < 0:
            return
        try:
            if self._file >= 0:
                self.flush()
        finally:
            self._let_go()
            os.close(self._lock)
            self._lock = -1

    def _write(self, body: bytes) -> None:
        """One batch. The part of it that a full disk took is removed again."""
        number = NUMBER.pack(self._number)
        head = HEAD.pack(MARK, len(body), zlib.crc32(body, zlib.crc32(number)), self._number)
        start = os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            with writing(self._path):
                _write_all(self._file, head + body)
                if self._fsync:
                    os.fsync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, start)
                os.lseek(self._file, start, os.SEEK_SET)
            raise
        self._number += 1
        self._growth.add(HEAD.size + len(body))

    def _check(self, header: bytes | None) -> None:
        if header is None:
            raise JournalError(f"{self._path} has no readable header")
        remedy = "remove the folder and go on from the newest checkpoint with run.resume=true"
        self.outdated = self._header.is_before(next(split(header)), str(self._path), remedy)

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _batches_of(packed: bytes, at: int, first: int) -> Iterator[tuple[int, bytes]]:
    """(where it ends, body) of each good batch from byte `at` on, numbered from `first`, up to the first bad one."""
    while True:
        body = _body(packed, at, first)
        if body is None:
            return
        at, first = at + HEAD.size + len(body), first + 1
        yield at, body


def _body(packed: bytes, at: int, least: int) -> bytes | None:
    """The body of the batch at byte `at`, if it is whole and has number `least`."""
    found = _numbered_body(packed, at)
    return found[1] if found is not None and found[0] == least else None


def _numbered_body(packed: bytes, at: int) -> tuple[int, bytes] | None:
    if at + HEAD.size > len(packed):
        return None
    mark, length, checksum, number = HEAD.unpack_from(packed, at)
    body = packed[at + HEAD.size : at + HEAD.size + length]
    if mark != MARK or len(body) < length or zlib.crc32(body, zlib.crc32(NUMBER.pack(number))) != checksum:
        return None
    return number, body


def _good_batch_after(packed: bytes, at: int, number: int) -> bool:
    """Whether a whole batch that was written later lies somewhere behind."""
    while (at := packed.find(MARK, at)) >= 0:
        found = _numbered_body(packed, at)
        if found is not None and found[0] >= number:
            return True
        at += 1
    return False


def _write_all(file: int, packed: bytes) -> None:
    view = memoryview(packed)
    while view:
        view = view[os.write(file, view) :]


def _locked(path: Path) -> int:
    """A descriptor that holds the lock. JournalError if another process has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace") or "unknown"
        os.close(lock)
        raise JournalError(f"another broker (process {owner}) uses {path.parent}") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock
