"""The replies of the queue, as its clients receive them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.types import Group, Task, Version

Stamps = Mapping[str, Version]
"""Stage -> version of the policy that its columns depend on; NO_VERSION: of none."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """streams: those that a learner has opened. closed: the reason, if the run is over."""

    run: str
    streams: tuple[str, ...]
    closed: str | None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to do a task, until it is not renewed in time. epoch: the fencing token of this lease.

    progress: the frames that `QueueClient.progress` stored for the task under earlier leases; maybe none.
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
    """This rank's groups of one claim. last: the step is complete. so_far: the step's groups so far.

    attempt: goes with the step's further claims · ahead: the step before still runs · ordinals: of all its groups, also
    those that were received before · stamps: of each group's columns · workers: that made the groups; empty where that
    was before the broker started
    """

    groups: list[Group]
    last: bool
    so_far: int
    attempt: int = 0
    ahead: bool = False
    ordinals: Sequence[int] = ()
    stamps: Sequence[Stamps] = ()
    workers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Trained:
    """version: the one now published. stats: the latest telemetry of each worker. depth: the ledger's counts."""

    version: Version
    stats: Mapping[str, Mapping[str, Any]]
    depth: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Peek:
    """Where a task stands.

    worker   the name of the worker that has leased it, for `since_s` seconds
    group    the committed group, if there is one
    problem  the reason why the group cannot be read, if so
    """

    state: str
    task: Task | None
    worker: str | None
    since_s: float | None
    group: Group | None
    problem: str | None
