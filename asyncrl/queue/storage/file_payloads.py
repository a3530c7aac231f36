"""Payloads in files: they are appended to segments, and a segment of which nothing is wanted any more is deleted.

    segment-000007    record · record · …
    record            mark · bytes and crc32 of the label · label (msgpack: key, stamp, frame lengths) · the frames

Groups come and go roughly in order, so that segments empty from the oldest on. The label alone has a checksum here:
a group's own digest travels in its first frame, and whoever reads the group checks it.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgpack

from asyncrl.queue.storage.store import Frames, PayloadKey
from asyncrl.system.disk import make_folder, sync_folder, writing

log = logging.getLogger(__name__)

MARK = b"\xa5PAY"
HEAD = struct.Struct("<4sII")
SEGMENT_BYTES = 64 << 20
MOST_BUFFERS = 512
"""Buffers of one write; the system allows 1024."""


@dataclass(slots=True, eq=False)
class PayloadSegment:
    path: Path | None
    file: int
    size: int = 0
    live: int = 0  # records that are wanted


@dataclass(frozen=True, slots=True)
class PayloadRecord:
    """Where a payload lies. start: of its frames."""

    segment: PayloadSegment
    start: int
    lengths: tuple[int, ...]
    stamp: int

    @property
    def nbytes(self) -> int:
        return sum(self.lengths)


class FilePayloads:
    """lasting: it is found again by whoever comes next; otherwise its files have no name and go with the process.

    fsync: as in FileJournal. A record that cannot be read, and what follows it in its segment, is lost, and its group
    will be made again.
    """

    def __init__(
        self, folder: Path, *, lasting: bool = True, fsync: bool = False, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._folder, self._lasting, self._fsync = folder, lasting, fsync
        self._segment_bytes = segment_bytes
        self._records: dict[PayloadKey, PayloadRecord] = {}
        self._unsynced: list[PayloadSegment] = []
        self._unsynced_names = False  # a segment was made since the folder was synced
        self._current: PayloadSegment | None = None
        self.nbytes = 0
        make_folder(folder, fsync=fsync)
        paths = sorted(folder.glob("segment-*")) if lasting else []
        self._next = 1 + max((int(path.name.removeprefix("segment-")) for path in paths), default=0)
        for path in paths:
            self._find(path)

    def write(self, key: PayloadKey, frames: Frames, stamp: int) -> None:
        views = [memoryview(frame).cast("B") for frame in frames]
        lengths = tuple(map(len, views))
        label = msgpack.packb([*key, stamp, lengths])
        segment = self._open_segment()
        with writing(segment.path or self._folder):
            _write_all(segment, [HEAD.pack(MARK, len(label), zlib.crc32(label)), label, *views])
        start = segment.size + HEAD.size + len(label)
        segment.size = start + sum(lengths)
        self.erase(key)  # only now: whoever dies in between leaves the one before
        self._note(key, PayloadRecord(segment, start, lengths, stamp))
        if self._fsync and segment not in self._unsynced:
            self._unsynced.append(segment)

    def read(self, key: PayloadKey) -> Frames:
        record = self._records.get(key)
        if record is None:
            return ()
        packed = memoryview(os.pread(record.segment.file, record.nbytes, record.start))
        frames, at = [], 0
        for length in record.lengths:
            frames.append(packed[at : at + length])
            at += length
        return frames

    def erase(self, key: PayloadKey) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        self.nbytes -= record.nbytes
        record.segment.live -= 1
        if not record.segment.live and record.segment is not self._current:
            self._delete(record.segment)

    def flush(self) -> None:
        for segment in self._unsynced:
            with writing(segment.path or self._folder):
                os.fsync(segment.file)
        if self._unsynced and self._unsynced_names:
            sync_folder(self._folder)
            self._unsynced_names = False
        self._unsynced = []

    def stamps(self) -> Mapping[PayloadKey, int]:
        return {key: record.stamp for key, record in self._records.items()}

    def close(self) -> None:
        self.flush()
        segments = {record.segment for record in self._records.values()}
        for segment in segments | ({self._current} if self._current is not None else set()):
            os.close(segment.file)
        self._records, self._current = {}, None

    # ------------------------------------------------------------------ segments

    def _open_segment(self) -> PayloadSegment:
        full = self._current
        if full is None or full.size >= self._segment_bytes:
            self._current = self._new_segment()
            if full is not None and not full.live:
                self._delete(full)
        assert self._current is not None
        return self._current

    def _new_segment(self) -> PayloadSegment:
        if not self._lasting:
            with tempfile.TemporaryFile(dir=self._folder) as unnamed:  # by O_TMPFILE: it never has a name
                return PayloadSegment(None, os.dup(unnamed.fileno()))
        path = self._folder / f"segment-{self._next:06d}"
        self._next += 1
        self._unsynced_names = True
        return PayloadSegment(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))

    def _delete(self, segment: PayloadSegment) -> None:
        if segment in self._unsynced:
            self._unsynced.remove(segment)
        os.close(segment.file)
        if segment.path is not None:
            segment.path.unlink()

    def _note(self, key: PayloadKey, record: PayloadRecord) -> None:
        self._records[key] = record
        record.segment.live += 1
        self.nbytes += record.nbytes

    def _find(self, path: Path) -> None:
        """Take in a segment of an earlier life; of several records under one key the last counts."""
        segment = PayloadSegment(path, os.open(path, os.O_RDONLY), path.stat().st_size)
        segment.live += 1  # while it is read
        end = 0
        for key, record in _records(segment):
            self.erase(key)
            self._note(key, record)
            end = record.start + record.nbytes
        if end < segment.size:
            log.warning("%s: the last %d bytes cannot be read", path, segment.size - end)
        segment.live -= 1
        if not segment.live:
            self._delete(segment)


def _records(segment: PayloadSegment) -> Iterator[tuple[PayloadKey, PayloadRecord]]:
    at = 0
    while True:
        head = os.pread(segment.file, HEAD.size, at)
        if len(head) < HEAD.size:
            return
        mark, length, checksum = HEAD.unpack(head)
        label = os.pread(segment.file, length, at + HEAD.size) if mark == MARK else b""
        if mark != MARK or len(label) < length or zlib.crc32(label) != checksum:
            return
        stream, ordinal, part, stamp, lengths = msgpack.unpackb(label)
        record = PayloadRecord(segment, at + HEAD.size + length, tuple(lengths), stamp)
        at = record.start + record.nbytes
        if at > segment.size:
            return
        yield PayloadKey(stream, ordinal, part), record


def _write_all(segment: PayloadSegment, buffers: list[bytes | memoryview]) -> None:
    """Behind what is there. The next record overwrites the part that a full disk took."""
    left, at = [memoryview(buffer) for buffer in buffers if len(buffer)], segment.size
    while left:
        written = os.pwritev(segment.file, left[:MOST_BUFFERS], at)
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
