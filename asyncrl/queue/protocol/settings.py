"""The settings of a stream: its pace, its stages, and the frontier that a rewind goes back to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_NAMES = 32
"""Stages of a stream, and columns of one stage or claim."""

MAX_NAME = 64
"""Characters of the name of a stage or column."""

Names = Annotated[tuple[str, ...], Meta(max_length=MAX_NAMES)]


MAX_COUNT = 1 << 40
"""Limit of what is added up or multiplied: the journal's numbers have 64 bits."""

Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]


@dataclass(frozen=True, slots=True)
class StageSettings:
    """A pool that works on committed groups: it takes those that have `needs` and gives them `adds`.

    >>> StageSettings("critic", needs=("rewards",), adds=("values",)).name
    'critic'
    """

    name: str
    needs: Names = ()
    adds: Names = ()

    def __post_init__(self) -> None:
        check_names("stages", (self.name,))
        check_names(f"needs of stage {self.name!r}", self.needs)
        check_names(f"adds of stage {self.name!r}", self.adds)
        if not self.adds:
            raise ValueError(f"stage {self.name!r} adds nothing")


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The pace of a stream. The learner sends it when it opens the stream.

    groups_per_version  B · max_staleness  η, None: unbounded · window  W, None: any order
    depth               most groups leased or ready at once
    max_bytes           payload bytes above which nothing new is leased
    lease_s             a lease not renewed for this long goes back to pending
    learners            learner ranks that share the groups of a step
    columns             columns that a group needs to be claimed, beyond those of every group
    stages              the pools that add columns
    wait_share          the share of its time that the learner may wait for groups: no more is leased ahead than
                        that takes; None: as much as the bound and the depth allow
    even_tokens         length of a rollout at which attention costs the learner as much as all else; None: groups
                        cost what they have of tokens
    hedge_s             a task that the learner may wait for, leased for longer, is leased to a second worker too where
                        nothing else may be leased; None: never
    retain              keep trained steps until a checkpoint holds them, to hand them out again after a rewind
    """

    groups_per_version: Annotated[int, Meta(lt=MAX_COUNT)]
    max_staleness: int | None
    window: int | None
    depth: int
    max_bytes: int
    lease_s: float
    learners: int = 1
    columns: Names = ()
    stages: Annotated[tuple[StageSettings, ...], Meta(max_length=MAX_NAMES)] = ()
    wait_share: float | None = None
    retain: bool = True
    even_tokens: float | None = None
    hedge_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("groups_per_version", "depth", "max_bytes", "lease_s", "learners"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be above 0")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window = {self.window} must be at least 1")
        if self.even_tokens is not None and not self.even_tokens > 0:
            raise ValueError(f"even_tokens = {self.even_tokens!r} must be above 0")
        if self.hedge_s is not None and not self.hedge_s > 0:
            raise ValueError(f"hedge_s = {self.hedge_s!r} must be above 0")
        if self.wait_share is not None and not 0 < self.wait_share < 1:
            raise ValueError(f"wait_share = {self.wait_share!r} must be between 0 and 1")
        self._check_stages()
        self._check_bound()

    def _check_stages(self) -> None:
        check_names("columns", self.columns)
        check_names("stages", tuple(stage.name for stage in self.stages))
        check_names("columns added by stages", tuple(name for stage in self.stages for name in stage.adds))

    def _check_bound(self) -> None:
        if self.max_staleness is None:
            if self.wait_share is not None:
                raise ValueError("wait_share is for a bounded stream")
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

    def cost(self, tokens: int, squares: int) -> float:
        """The cost of a group in tokens of short rollouts. squares: sum of its segments' squared lengths."""
        return tokens + (squares / self.even_tokens if self.even_tokens else 0.0)

    def same_steps(self, other: StreamSettings) -> bool:
        """Whether a step recorded under `other` may be handed out under these."""
        names = ("groups_per_version", "max_staleness", "window", "learners", "columns", "stages")
        return all(getattr(self, name) == getattr(other, name) for name in names)


FRONTIER_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Frontier:
    """The ended ordinals, and the counts that admission needs: the state that a rewind goes back to.

    lineage       few bits: a lease's epoch has them above the 40 of its grant
    frontier      lowest ordinal that has not ended · kept: how many below it were trained
    trained, dropped_ordinals   ends above the frontier
    published     F: groups trained when a version was published, for the versions that still matter
    """

    lineage: Annotated[int, Meta(ge=0, lt=1 << 22)] = 0
    version: Count = 0
    frontier: Count = 0
    kept: Count = 0
    trained: tuple[Count, ...] = ()
    dropped_ordinals: tuple[Count, ...] = ()
    dropped: Mapping[str, Count] = field(default_factory=dict)
    published: Mapping[Count, Count] = field(default_factory=lambda: {0: 0})
    grants: Count = 0

    @property
    def trained_total(self) -> int:
        return self.kept + len(self.trained)

    def to_wire(self) -> dict[str, Any]:
        return {"format": FRONTIER_FORMAT, **asdict(self)}

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> Frontier:
        """The frontier of `to_wire`. ValueError for anything else."""
        found = wire.get("format")
        if found != FRONTIER_FORMAT:
            raise ValueError(f"snapshot format {found!r}, this side reads {FRONTIER_FORMAT}")
        missing = {each.name for each in fields(Frontier)} - wire.keys()
        if missing:
            raise ValueError(f"a snapshot without {sorted(missing)}")
        frontier = msgspec.convert(wire, Frontier)
        if frontier.version not in frontier.published:
            raise ValueError("not a snapshot of a stream")
        return replace(
            frontier,
            trained=tuple(sorted(frontier.trained)),
            dropped_ordinals=tuple(sorted(frontier.dropped_ordinals)),
        )


def check_names(what: str, names: tuple[str, ...]) -> None:
    """ValueError unless these are a few distinct, short, plain names."""
    if len(names) > MAX_NAMES or len(set(names)) < len(names):
        raise ValueError(f"{what}: at most {MAX_NAMES} names, none twice, not {names!r}")
    for name in names:
        if type(name) is not str or not 0 < len(name) <= MAX_NAME:
            raise ValueError(f"{what}: {name!r} is no name of 1 to {MAX_NAME} characters")
