"""The records of the queue's journal, everything that the next broker needs to go on where one ended, as msgpack.

Happened      an event of a stream's ledger
TasksKept     the bytes of submitted tasks
Posted        an entry of the run's registry
Closed        the run is over
StreamState   a snapshot of a ledger's state, in place of all its earlier events

bytes         [name of the event or record, stream of an event, fields]     a list of a NamedTuple's fields,
                                                                            a map of a dataclass's. Never pickle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from asyncrl.errors import JournalError
from asyncrl.queue.ledger.events import LATER, Event
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.protocol.requests import UNREADABLE


class Happened(NamedTuple):
    stream: str
    event: Event


class TasksKept(NamedTuple):
    """(ordinal, packed task) …"""

    stream: str
    tasks: tuple[tuple[int, bytes], ...]


class Posted(NamedTuple):
    key: str
    value: bytes


class Closed(NamedTuple):
    reason: str


class StreamState(NamedTuple):
    stream: str
    state: LedgerState


Record = Happened | TasksKept | Posted | Closed | StreamState


def encode_record(record: Record) -> bytes:
    if isinstance(record, Happened):
        return _ENCODER.encode((type(record.event).__name__, record.stream, record.event))
    return _ENCODER.encode((type(record).__name__, "", record))


def decode_record(packed: bytes) -> Record:
    """The record of `encode_record`. JournalError for anything else."""
    name = "a record"
    try:
        name, stream, packed_fields = _HEAD.decode(packed)
        if name not in _DECODERS:
            raise JournalError(f"a record of unknown kind {name[:80]!r}")
        value = _DECODERS[name].decode(packed_fields)
    except UNREADABLE as error:
        raise JournalError(f"{name}: {error}") from error
    return Happened(stream, value) if isinstance(value, get_args(Event)) else value


def as_counter(cls: type, value: Any) -> Counter[Any]:
    """The one class of the records that msgspec does not know."""
    return Counter(value)


def _held_by(hint: Any) -> Iterator[type]:
    """The dataclasses and NamedTuples that a value of this type may consist of."""
    inside = get_args(hint)
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        yield hint
        inside = tuple(get_type_hints(hint).values())
    for part in inside:
        yield from _held_by(part)


def _names(cls: type) -> list[str]:
    return [field.name for field in fields(cls)] if is_dataclass(cls) else list(getattr(cls, "_fields", ()))


_ENCODER = msgspec.msgpack.Encoder()
_HEAD = msgspec.msgpack.Decoder(tuple[str, str, msgspec.Raw])
_DECODERS = {
    cls.__name__: msgspec.msgpack.Decoder(cls, dec_hook=as_counter)
    for cls in (*get_args(Event), TasksKept, Posted, Closed, StreamState)
}

SCHEMA = ";".join(
    sorted(
        f"{cls.__name__}({','.join(name for name in _names(cls) if f'{cls.__name__}.{name}' not in LATER)})"
        for cls in {*_held_by(Record)}
        if cls.__name__ not in LATER
    )
)
"""Names of the classes and their fields: what both sides of a journal must agree on."""
