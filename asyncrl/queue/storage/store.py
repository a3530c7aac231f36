"""Payloads at the broker: frames by stream, ordinal and part, held in memory and put away on a shelf.

             put                            trained: kept for a rewind only, `cool`
    ──▸ in memory ─────────────────────────────────────────▸ cool ── beyond `cool_bytes` ──▸ on the shelf only
            │ durable: written to the shelf as well                                              │
            └──▸ get: the frames as they came, never copied        get: read from the shelf ◂────┘

    store     shelf                     what survives the broker
    memory    none, or files to spill   nothing
    file      files                     every payload that was flushed
    redis     Redis                     the same, on any host

The ledger bounds what is in memory and not cool; `cool_bytes` bounds the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Frames = Sequence[Any]
"""Raw frames (`zmq.Frame`s at a real broker), never looked into."""

COOL_BYTES = 1 << 30
TIDY_BYTES = 8 << 20
"""Written to the shelf at most in one turn of the broker: long writes would make everybody wait."""

PayloadName = tuple[str, int]
"""Stream and ordinal."""


class PayloadKey(NamedTuple):
    stream: str
    ordinal: int
    part: str


class PayloadBackend(Protocol):
    """Where payloads are put away. OSError if there is no room left."""

    def write(self, key: PayloadKey, frames: Frames, stamp: int) -> None:
        """In place of what is there under this key."""

    def read(self, key: PayloadKey) -> Frames:
        """As many frames with the same bytes; none if there is no such key."""

    def erase(self, key: PayloadKey) -> None:
        """Again: nothing."""

    def flush(self) -> None:
        """What was written and erased so far is so for whoever comes next."""

    def stamps(self) -> Mapping[PayloadKey, int]:
        """What lies here: key -> the stamp that it was written with.

        After a restart it may hold again what was erased before.
        """

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """Bytes in memory, and of these those kept for a rewind only; bytes on the shelf."""

    memory: int
    cool: int
    shelf: int


class StoredPart(NamedTuple):
    """One part in memory."""

    frames: Frames
    nbytes: int
    stamp: int


class PayloadStore:
    """durable: everything is written to the shelf at once, and is there again after a restart.

    Without a shelf everything stays in memory.
    """

    def __init__(
        self,
        shelf: PayloadBackend | None = None,
        *,
        durable: bool = False,
        cool_bytes: int = COOL_BYTES,
        tidy_bytes: int = TIDY_BYTES,
    ) -> None:
        self._shelf, self._durable = shelf, durable
        self._cool_bytes, self._tidy_bytes = cool_bytes, tidy_bytes
        self._held: dict[PayloadName, dict[str, StoredPart]] = {}
        self._away: dict[PayloadName, set[str]] = {}  # parts on the shelf
        self._cool: OrderedDict[PayloadName, int] = OrderedDict()  # -> bytes; coolest first
        self._memory = self._cooled = 0
        self._doomed: dict[PayloadKey, None] = {}  # dropped since the last flush
        self._due: dict[PayloadKey, None] = {}  # dropped before it
        for key in shelf.stamps() if shelf is not None else ():
            self._away.setdefault(key[:2], set()).add(key.part)

    def put(self, stream: str, ordinal: int, part: str, frames: Frames, stamp: int = 0) -> None:
        """In place of what is there; no frames are the same as nothing there.

        stamp: tells one payload from another after a restart.
        """
        if not frames:
            self.drop(stream, ordinal, part)
            return
        self._forget((stream, ordinal), part)
        held = StoredPart(frames, sum(map(len, frames)), stamp)
        self._held.setdefault((stream, ordinal), {})[part] = held
        self._memory += held.nbytes
        if self._durable:
            self._put_away(PayloadKey(stream, ordinal, part), held)
        elif self._away:
            self._doom(PayloadKey(stream, ordinal, part))

    def get(self, stream: str, ordinal: int, part: str) -> Frames:
        """No frames, if there is no such part."""
        held = self._held.get((stream, ordinal), {}).get(part)
        if held is not None:
            return held.frames
        if self._shelf is None or part not in self._away.get((stream, ordinal), ()):
            return ()
        return self._shelf.read(PayloadKey(stream, ordinal, part))

    def drop(self, stream: str, ordinal: int, part: str | None = None) -> None:
        """One part, or all of an ordinal's. The shelf keeps them until it is sure that they will not be asked for."""
        place = stream, ordinal
        held, away = self._held.get(place), self._away.get(place)
        if held is not None:
            for each in [part] if part else list(held):
                self._forget(place, each)
        if away is not None:
            for each in [part] if part else list(away):
                self._doom(PayloadKey(stream, ordinal, each))

    def cool(self, stream: str, ordinal: int) -> None:
        """Kept only for a rewind from now on."""
        place = stream, ordinal
        if place in self._held and place not in self._cool:
            self._cool[place] = sum(held.nbytes for held in self._held[place].values())
            self._cooled += self._cool[place]

    def tidy(self) -> None:
        """Bring cool payloads down to `cool_bytes`, a part of them at a time."""
        moved = 0
        while self._shelf is not None and self._cooled > self._cool_bytes and moved < self._tidy_bytes:
            stream, ordinal = place = next(iter(self._cool))
            moved += self._cool[place]
            for part, held in list(self._held[place].items()):
                if part not in self._away.get(place, ()):
                    self._put_away(PayloadKey(stream, ordinal, part), held)
                self._forget(place, part)

    def flush(self) -> None:
        """What was put so far is as durable as this store promises. To be called before the journal is flushed.

        What was dropped goes with the next flush: only then does the journal say for sure that it is not needed.
        """
        if self._shelf is None:
            return
        for key in self._due:
            self._shelf.erase(key)
        self._shelf.flush()
        self._due, self._doomed = self._doomed, {}

    def recovered(self) -> Mapping[PayloadKey, int]:
        """What the shelf holds, also of an earlier life: key -> stamp. Empty unless durable.

        Some of it may have been dropped in that life; whoever knows better drops it again.
        """
        return self._shelf.stamps() if self._shelf is not None and self._durable else {}

    def sizes(self) -> StoreSizes:
        return StoreSizes(self._memory, self._cooled, 0 if self._shelf is None else self._shelf.nbytes)

    def close(self) -> None:
        if self._shelf is not None:
            self._shelf.close()

    # ------------------------------------------------------------------ memory and shelf

    def _forget(self, place: PayloadName, part: str) -> None:
        """In memory. Of what is not there: nothing."""
        parts = self._held.get(place, {})
        held = parts.pop(part, None)
        if held is None:
            return
        self._memory -= held.nbytes
        if place in self._cool:
            self._cool[place] -= held.nbytes
            self._cooled -= held.nbytes
        if not parts:
            del self._held[place]
            self._cool.pop(place, None)

    def _put_away(self, key: PayloadKey, held: StoredPart) -> None:
        assert self._shelf is not None
        self._shelf.write(key, held.frames, held.stamp)
        self._away.setdefault(key[:2], set()).add(key.part)
        for dropped in (self._doomed, self._due):
            dropped.pop(key, None)

    def _doom(self, key: PayloadKey) -> None:
        """On the shelf. Of what is not there: nothing."""
        parts = self._away.get(key[:2], set())
        if key.part not in parts:
            return
        self._doomed[key] = None
        parts.remove(key.part)
        if not parts:
            del self._away[key[:2]]
