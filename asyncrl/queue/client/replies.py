"""What the queue tells its clients, and how groups are put together from the frames of a reply."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import WireError
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.columns import decode_columns, with_columns
from asyncrl.queue.wire.payload import decode_group
from asyncrl.types import Group, Task, Version

log = logging.getLogger(__name__)

Frames = Sequence[wire.Buffer]

Stamps = Mapping[str, Version]
"""Stage -> version of the policy that the columns it has added depend on; NO_VERSION: of none."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What hello tells. streams: those that a learner has opened. closed: why the run is over, if it is."""

    run: str
    streams: tuple[str, ...]
    closed: str | None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to do a task, until it is not renewed in time. epoch: the fencing token of this lease.

    progress: what earlier leases have finished of the task, as `QueueClient.progress` was given it; maybe nothing.
    """

    task: Task
    epoch: int
    progress: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StageLease:
    """The right to do one stage of a group, as `Lease`. stamps: of the columns that the group has so far."""

    stage: str
    group: Group
    epoch: int
    stamps: Stamps = field(default_factory=dict)

    @property
    def task(self) -> Task:
        return self.group.task


@dataclass(frozen=True, slots=True)
class Renewal:
    """lost: (stream, ordinal, epoch) of leases that are over, to be aborted. closed: the run is over."""

    lost: list[tuple[str, int, int]]
    closed: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """learner_epoch goes with every request of the learner; version is the step to train first."""

    learner_epoch: int
    lineage: int
    version: Version


@dataclass(frozen=True, slots=True)
class Claim:
    """This rank's groups of one claim. last: the step is complete. ordinals_all: the step's groups so far.

    attempt: goes with the step's further claims · stamps: of each group's columns
    """

    groups: list[Group]
    last: bool
    ordinals_all: int
    attempt: int = 0
    stamps: Sequence[Stamps] = ()


@dataclass(frozen=True, slots=True)
class Trained:
    """version: the one now published. stats: what each worker said last. depth: the ledger's counts."""

    version: Version
    stats: dict[str, dict[str, Any]]
    depth: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Peek:
    """Where a task stands. worker: who has leased it, since how many seconds. group: what was made of it, if it was.

    problem: why the group cannot be read, if so.
    """

    state: str
    task: Task | None
    worker: str | None
    since_s: float | None
    group: Group | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Received:
    """The groups of a reply. corrupt: what is wrong with those that are none, by ordinal."""

    ordinals: list[int]
    groups: list[Group]
    stamps: list[Stamps]
    corrupt: dict[int, WireError]


def received(value: Mapping[str, Any], frames: Frames) -> Received:
    """Of the reply to 'claim' or 'collect'."""
    all_of_it = Received([], [], [], {})
    read = groups_of(value["groups"], value["columns"], frames)
    for ordinal, one in zip(value["ordinals"], read, strict=True):
        if not isinstance(one, WireError) and one[0].task.ordinal != ordinal:
            one = WireError(f"it says that it is of ordinal {one[0].task.ordinal}")
        if isinstance(one, WireError):
            log.error("the group of ordinal %d cannot be read: %s", ordinal, one)
            all_of_it.corrupt[ordinal] = one
            continue
        all_of_it.ordinals.append(ordinal)
        all_of_it.groups.append(one[0])
        all_of_it.stamps.append(one[1])
    return all_of_it


def leases_of(granted: Sequence[Any], frames: Frames) -> list[Lease]:
    """Of the reply to 'lease': [ordinal, epoch, task, number of frames] each."""
    taken = _take(frames, [count for *_, count in granted])
    return [
        Lease(wire.task_from_wire(task), epoch, tuple(map(bytes, progress)))
        for (_, epoch, task, _), progress in zip(granted, taken, strict=True)
    ]


def groups_of(
    counts: Sequence[int], columns: Sequence[Sequence[Any]], frames: Frames
) -> list[tuple[Group, Stamps] | WireError]:
    """Groups with their columns, or what is wrong with them.

    counts: frames of each group itself · columns: [stage, version, frames] of each of its column parts, which follow.
    """
    sizes = [[count, *(n for _, _, n in parts)] for count, parts in zip(counts, columns, strict=True)]
    whole = list(_take(frames, [sum(group) for group in sizes]))
    return [
        _group(_take(taken, group), parts) for taken, group, parts in zip(whole, sizes, columns, strict=True)
    ]


def _group(taken: Iterator[Frames], parts: Sequence[Any]) -> tuple[Group, Stamps] | WireError:
    try:
        group = decode_group(next(taken))
        for _ in parts:
            group = with_columns(group, decode_columns(next(taken)))
    except WireError as error:
        return error
    return group, {stage: version for stage, version, _ in parts}


def _take(frames: Frames, counts: Sequence[int]) -> Iterator[Frames]:
    """So many frames after one another."""
    at = 0
    for count in counts:
        yield frames[at : at + count]
        at += count
