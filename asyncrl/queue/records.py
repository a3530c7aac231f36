"""What the queue's journal holds: everything that a broker must know to go on where another one ended.

Happened      an event of a stream's ledger
TasksKept     the bytes of tasks that came in
Posted        an entry of the run's directory
Closed        the run is over
StreamState   a snapshot of a stream's book, in place of all its events before
"""

from __future__ import annotations

from typing import NamedTuple, get_args

from asyncrl.queue.bias import Bias
from asyncrl.queue.book import Book
from asyncrl.queue.codec import Codec
from asyncrl.queue.events import Event
from asyncrl.queue.item import Item
from asyncrl.queue.leases import Lease, Leases
from asyncrl.queue.ranks import Ranks
from asyncrl.queue.retention import Retention, Step
from asyncrl.queue.sizes import Sizes
from asyncrl.queue.stages import Stages, Waiting


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
    book: Book


Record = Happened | TasksKept | Posted | Closed | StreamState

CODEC = Codec(
    [*get_args(Record), Item, Lease, Step],
    [Book(), Ranks(), Leases(), Stages(), Waiting(), Retention(0), Sizes(), Bias()],
)
