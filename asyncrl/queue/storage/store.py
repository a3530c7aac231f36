"""Payloads at the broker: frames by stream, ordinal and part, held in memory and written to a backend.

             put                            trained: kept for a rewind only, `cool`
    ──▸ in memory ─────────────────────────────────────────▸ cool ── beyond `cool_bytes` ──▸ in the backend only
            │ durable: written to the backend as well                                            │
            └──▸ get: the frames as they came, never copied        get: read from the backend ◂──┘

    store     backend                   what survives the broker
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
"""Bytes written to the backend in one turn of the broker, at most: long writes would make everybody wait."""

PayloadName = tuple[str, int]
"""Stream and ordinal."""


class PayloadKey(NamedTuple):
    stream: str
    ordinal: int
    part: str


class PayloadBackend(Protocol):
    """Storage outside of the broker's memory. OSError if there is no room left."""

    def write(self, key: PayloadKey, frames: Frames, stamp: int) -> None:
        """In place of what is there under this key."""

    def read(self, key: PayloadKey) -> Frames:
        """As many frames with the same bytes; none if there is no such key."""

    def erase(self, key: PayloadKey) -> None:
        """Idempotent."""

    def flush(self) -> None:
        """Make all writes and erasures so far durable."""

    def stamps(self) -> Mapping[PayloadKey, int]:
        """The stamp of each stored payload.

        After a restart it may hold again what was erased before.
        """

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """Bytes in memory, and of these those kept for a rewind only; bytes in the backend (`shelf`)."""

    memory: int
    cool: int
    shelf: int


class StoredPart(NamedTuple):
    """One part in memory."""

    frames: Frames
    nbytes: int
    stamp: int


class PayloadStore:
    """durable: everything is written to the backend at once, and is there again after a restart.

    Without a backend everything stays in memory.
    """

    def __init__(
        self,
        backend: PayloadBackend | None = None,
        *,
        durable: bool = False,
        cool_bytes: int = COOL_BYTES,
        tidy_bytes: int = TIDY_BYTES,
    ) -> None:
        self._backend, self._durable = backend, durable
        self._cool_bytes, self._tidy_bytes = cool_bytes, tidy_bytes
        self._held: dict[PayloadName, dict[str, StoredPart]] = {}
        self._away: dict[PayloadName, set[str]] = {}  # parts in the backend
        self._cool: OrderedDict[PayloadName, int] = OrderedDict()  # -> bytes; coolest first
        self._memory = self._cooled = 0
        self._doomed: dict[PayloadKey, None] = {}  # dropped since the last flush
        self._due: dict[PayloadKey, None] = {}  # dropped before it
        for key in backend.stamps() if backend is not None else ():
            self._away.setdefault(key[:2], set()).add(key.part)

    def put(self, stream: str, ordinal: int, part: str, frames: Frames, stamp: int = 0) -> None:
        """In place of what is there; no frames are the same as nothing there.

        stamp: distinguishes payloads after a restart.
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
        if self._backend is None or part not in self._away.get((stream, ordinal), ()):
            return ()
        return self._backend.read(PayloadKey(stream, ordinal, part))

    def drop(self, stream: str, ordinal: int, part: str | None = None) -> None:
        """One part, or all of an ordinal's. The backend keeps them until no restart can need them."""
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
        while self._backend is not None and self._cooled > self._cool_bytes and moved < self._tidy_bytes:
            stream, ordinal = place = next(iter(self._cool))
            moved += self._cool[place]
            for part, held in list(self._held[place].items()):
                if part not in self._away.get(place, ()):
                    self._put_away(PayloadKey(stream, ordinal, part), held)
                self._forget(place, part)

    def flush(self) -> None:
        """Make all payloads as durable as this store promises. To be called before the journal is flushed.

        Dropped ones go with the next flush: only then is the journal sure that they are not needed.
        """
        if self._backend is None:
            return
        for key in self._due:
            self._backend.erase(key)
        self._backend.flush()
        self._due, self._doomed = self._doomed, {}

    def recovered(self) -> Mapping[PayloadKey, int]:
        """The stamps of the backend's payloads, also of an earlier life. Empty unless durable.

        Some may have been dropped in that life; the caller drops them again.
        """
        return self._backend.stamps() if self._backend is not None and self._durable else {}

    def sizes(self) -> StoreSizes:
        return StoreSizes(self._memory, self._cooled, 0 if self._backend is None else self._backend.nbytes)

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    # ------------------------------------------------------------------ memory and backend

    def _forget(self, place: PayloadName, part: str) -> None:
        """Remove a part from memory, if it is there."""
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
        assert self._backend is not None
        self._backend.write(key, held.frames, held.stamp)
        self._away.setdefault(key[:2], set()).add(key.part)
        for dropped in (self._doomed, self._due):
            dropped.pop(key, None)

    def _doom(self, key: PayloadKey) -> None:
        """Mark a part of the backend to be erased, if it is there."""
        parts = self._away.get(key[:2], set())
        if key.part not in parts:
            return
        self._doomed[key] = None
        parts.remove(key.part)
        if not parts:
            del self._away[key[:2]]
