"""Leases and groups, put together from the frames of a reply."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WireError
from asyncrl.queue.protocol.replies import Lease, Stamps
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.columns import decode_columns, with_columns
from asyncrl.queue.wire.payload import decode_group
from asyncrl.types import Group

log = logging.getLogger(__name__)

Frames = Sequence[wire.Buffer]


@dataclass(frozen=True, slots=True)
class Received:
    """The groups of a reply. corrupt: the errors of those that cannot be read, by ordinal.

    workers: that made the groups; empty where the broker does not know
    """

    ordinals: list[int]
    groups: list[Group]
    stamps: list[Stamps]
    corrupt: dict[int, WireError]
    workers: list[str]

    @property
    def count(self) -> int:
        return len(self.ordinals) + len(self.corrupt)

    def add(self, other: Received) -> None:
        """The groups of a further reply."""
        self.ordinals.extend(other.ordinals)
        self.groups.extend(other.groups)
        self.stamps.extend(other.stamps)
        self.corrupt.update(other.corrupt)
        self.workers.extend(other.workers)


def read_groups(value: Mapping[str, Any], frames: Frames) -> Received:
    """The groups in the reply to 'claim', 'collect' or 'peek'."""
    result = Received([], [], [], {}, [])
    read = groups_of(value["groups"], value["columns"], frames)
    for ordinal, worker, one in zip(value["ordinals"], value["workers"], read, strict=True):
        if not isinstance(one, WireError) and one[0].task.ordinal != ordinal:
            one = WireError(f"its task has ordinal {one[0].task.ordinal}")
        if isinstance(one, WireError):
            log.error(
                "the group of ordinal %d by %s cannot be read: %s",
                ordinal,
                worker or "an unknown worker",
                one,
            )
            result.corrupt[ordinal] = one
            continue
        result.ordinals.append(ordinal)
        result.groups.append(one[0])
        result.stamps.append(one[1])
        result.workers.append(worker)
    return result


def granted_leases(granted: Sequence[Any], frames: Frames) -> list[Lease]:
    """The leases in the reply to 'lease': [ordinal, epoch, task, number of frames] each."""
    taken = _take(frames, [count for *_, count in granted])
    return [
        Lease(wire.task_from_wire(task), epoch, tuple(map(bytes, progress)))
        for (_, epoch, task, _), progress in zip(granted, taken, strict=True)
    ]


def groups_of(
    counts: Sequence[int], columns: Sequence[Sequence[Any]], frames: Frames
) -> list[tuple[Group, Stamps] | WireError]:
    """Groups with their columns, or the errors of those that cannot be read.

    counts: frames of each group itself · columns: [stage, version, frames] of each of its column parts, which follow
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
    """Consecutive slices of so many frames each."""
    at = 0
    for count in counts:
        yield frames[at : at + count]
        at += count
