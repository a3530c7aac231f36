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
from asyncrl.queue.ledger.ledger_state import LedgerState
from asyncrl.queue.ledger.rules.group_sizes import GroupSizes
from asyncrl.queue.ledger.rules.leases import Lease, Leases
from asyncrl.queue.ledger.rules.length_bias import LengthBias
from asyncrl.queue.ledger.rules.lookahead import Lookahead
from asyncrl.queue.ledger.rules.ordinal_index import OrdinalIndex
from asyncrl.queue.ledger.rules.retained_steps import RetainedStep, RetainedSteps
from asyncrl.queue.ledger.rules.stages import Stages, Waiting
from asyncrl.queue.ledger.task_record import TaskRecord
from asyncrl.queue.protocol.settings import StageSettings
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
    book: LedgerState


Record = Happened | TasksKept | Posted | Closed | StreamState

CODEC = Codec(
    [*get_args(Record), TaskRecord, Lease, RetainedStep],
    [
        LedgerState(),
        OrdinalIndex(),
        Leases(),
        Stages(),
        Waiting(),
        RetainedSteps(0),
        GroupSizes(),
        LengthBias(),
    ],
    tags={
        LedgerState: "Book",
        TaskRecord: "Item",
        OrdinalIndex: "Ranks",
        RetainedStep: "Step",
        RetainedSteps: "Retention",
        Lookahead: "Lead",
        GroupSizes: "Sizes",
        LengthBias: "Bias",
        StageSettings: "Stage",
    },
)
"""Journals keep the names that these classes had first."""
