"""What can happen to a stream: its settings, and one frozen record per transition of the ledger.

The event log is the state: `Ledger.apply` of the same events on a fresh ledger gives the same ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.types import Version


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How a stream is paced. The learner sends it when it opens the stream.

    groups_per_version  B · max_staleness  η, None: unbounded · window  W, None: any order
    depth               most groups leased or ready at once
    max_bytes           payload bytes above which nothing new is leased
    lease_s             a lease not renewed for this long goes back to pending
    learners            learner ranks that share the groups of a step
    """

    groups_per_version: int
    max_staleness: int | None
    window: int | None
    depth: int
    max_bytes: int
    lease_s: float
    learners: int = 1

    def __post_init__(self) -> None:
        for name in ("groups_per_version", "depth", "max_bytes", "lease_s", "learners"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be above 0")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window = {self.window} must be at least 1")
        if self.max_staleness is None:
            return
        if self.window is None:
            raise ValueError("a bounded stream needs a window")
        if self.spare_versions < 0:
            raise ValueError(
                f"window = {self.window} leaves no room under max_staleness = {self.max_staleness}"
            )
        if self.depth < self.groups_per_version + self.window - 1:
            raise ValueError(f"depth = {self.depth} does not hold one batch and the window")

    @property
    def spare_versions(self) -> int:
        """S = η - ceil((W - 1) / B). Only for a bounded stream."""
        assert self.max_staleness is not None
        assert self.window is not None
        return self.max_staleness - math.ceil((self.window - 1) / self.groups_per_version)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> StreamSettings:
        """ValueError or TypeError unless every value is a number of the right kind."""
        for name, value in wire.items():
            numbers = (int, float) if name == "lease_s" else (int,)
            unset = value is None and name in ("max_staleness", "window")
            if type(value) not in numbers and not unset:
                raise ValueError(f"{name} = {value!r} is not a number of the right kind")
        return StreamSettings(**wire)


FRONTIER_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Frontier:
    """Which ordinals have ended and what admission still needs to know: all that a rewind goes back to.

    frontier      lowest ordinal that has not ended · kept: how many below it were trained
    trained, dropped_ordinals   ends above the frontier
    published     F: groups consumed when a version was published, for the versions that still matter
    """

    lineage: int = 0
    version: Version = 0
    frontier: int = 0
    kept: int = 0
    trained: tuple[int, ...] = ()
    dropped_ordinals: tuple[int, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    published: Mapping[Version, int] = field(default_factory=lambda: {0: 0})
    grants: int = 0

    def to_wire(self) -> dict[str, Any]:
        return {"format": FRONTIER_FORMAT, **asdict(self)}

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> Frontier:
        """ValueError, TypeError or KeyError for anything that `to_wire` did not make."""
        if wire["format"] != FRONTIER_FORMAT:
            raise ValueError(f"snapshot format {wire['format']!r}, this side reads {FRONTIER_FORMAT}")
        frontier = Frontier(
            trained=tuple(sorted(wire["trained"])),
            dropped_ordinals=tuple(sorted(wire["dropped_ordinals"])),
            dropped=dict(wire["dropped"]),
            published=dict(wire["published"]),
            **{name: wire[name] for name in ("lineage", "version", "frontier", "kept", "grants")},
        )
        numbers = [frontier.lineage, frontier.version, frontier.frontier, frontier.kept, frontier.grants]
        numbers += [*frontier.trained, *frontier.dropped_ordinals, *frontier.dropped.values()]
        numbers += [*frontier.published, *frontier.published.values()]
        if any(type(number) is not int or not 0 <= number < 1 << 40 for number in numbers) or (
            frontier.version not in frontier.published
        ):
            raise ValueError("not a snapshot of a stream")
        return frontier


@dataclass(frozen=True, slots=True)
class StreamOpened:
    settings: StreamSettings
    learner_epoch: int


@dataclass(frozen=True, slots=True)
class Rewound:
    """A learner came back at a checkpoint: a new lineage forks at `frontier`."""

    settings: StreamSettings
    learner_epoch: int
    lineage: int
    frontier: Frontier


@dataclass(frozen=True, slots=True)
class Forked:
    """Another stream of the run was rewound: leases of the abandoned lineage are void here too."""

    lineage: int


@dataclass(frozen=True, slots=True)
class Submitted:
    first: int
    count: int
    min_version: Version


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The feeder has no more tasks: the stream ends with those it was given, the last version maybe short."""


@dataclass(frozen=True, slots=True)
class Leased:
    """`grant` counts the leases of the stream; the lease's fencing epoch is made of it and the lineage."""

    ordinal: int
    worker: str
    grant: int
    held: Version
    at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Renewed:
    ordinals: tuple[int, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Requeued:
    """LEASED back to PENDING. why: 'expired', 'given_back', 'stale'."""

    ordinal: int
    why: str


@dataclass(frozen=True, slots=True)
class Committed:
    ordinal: int
    tokens: int
    nbytes: int
    start_version: Version
    digest: int


@dataclass(frozen=True, slots=True)
class Dropped:
    ordinal: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepClaimed:
    """The `index`-th claim of step `step`: shares[rank] are the ordinals that learner rank trains on.

    last: it completes the step.
    """

    step: int
    index: int
    shares: tuple[tuple[int, ...], ...]
    last: bool


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The step's groups are TRAINED and version step + 1 is published."""

    step: int


@dataclass(frozen=True, slots=True)
class StepRejected:
    """The step's groups are DROPPED (a loss that is not finite) and the step begins anew."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """Groups of an unbounded stream, taken and ended at once."""

    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    reason: str


Event = (
    StreamOpened
    | Rewound
    | Forked
    | Submitted
    | Exhausted
    | Leased
    | Renewed
    | Requeued
    | Committed
    | Dropped
    | StepClaimed
    | StepTrained
    | StepRejected
    | Collected
    | Finished
)
