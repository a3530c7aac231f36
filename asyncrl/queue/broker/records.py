"""The records of the queue's journal: everything that the next broker needs to go on where one ended.

Happened      an event of a stream's ledger
TasksKept     the bytes of submitted tasks
Posted        an entry of the run's registry
Closed        the run is over
StreamState   a snapshot of a ledger's state, in place of all its earlier events
"""

from __future__ import annotations

from typing import NamedTuple, get_args

from asyncrl.queue.ledger.events import Event
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.storage.event_codec import Codec


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

CODEC = Codec(get_args(Record))
