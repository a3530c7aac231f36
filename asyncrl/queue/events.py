"""What can happen to a stream: one frozen record of plain values per transition of the ledger.

The event log is the state: `Ledger.apply` of the same events on a fresh ledger gives the same ledger.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.queue.lead import Lead
from asyncrl.queue.settings import Frontier, Stage, StreamSettings
from asyncrl.types import Version

__all__ = ["Event", "Frontier", "Stage", "StreamSettings"]

# ---------------------------------------------------------------------- opening, rewinding, ending


@dataclass(frozen=True, slots=True)
class StreamOpened:
    settings: StreamSettings
    learner_epoch: int
    opener: str = ""


@dataclass(frozen=True, slots=True)
class Rewound:
    """A learner came back at a checkpoint and the steps since are not kept: the stream is reset to `frontier`."""

    settings: StreamSettings
    learner_epoch: int
    lineage: int
    frontier: Frontier
    opener: str = ""


@dataclass(frozen=True, slots=True)
class SteppedBack:
    """A learner came back at a checkpoint and the steps since are kept: they are claimed again as they were."""

    settings: StreamSettings
    learner_epoch: int
    lineage: int
    frontier: Frontier
    opener: str = ""


@dataclass(frozen=True, slots=True)
class Forked:
    """Another stream of the run was rewound: leases of the abandoned lineage are void here too."""

    lineage: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """The broker came back: leases begin anew under its clock; the groups of `lost` have to be made again."""

    at: float
    deadline: float
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drained:
    """What is pending ends as DROPPED(drained), no task is leased any more; what is under way is finished."""


@dataclass(frozen=True, slots=True)
class Finished:
    reason: str


# ---------------------------------------------------------------------- the task feeder


@dataclass(frozen=True, slots=True)
class Submitted:
    first: int
    count: int
    min_version: Version


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The feeder has no more tasks: the stream ends with those it was given, the last version maybe short."""


# ---------------------------------------------------------------------- generators


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
    """Of tasks and stages alike: `epochs` of the leases."""

    epochs: tuple[int, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Requeued:
    """LEASED back to PENDING. why: 'expired', 'given_back', 'stale'."""

    ordinal: int
    why: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """What is finished of a leased task is kept for whoever leases it next. Replaces what was kept before."""

    ordinal: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Committed:
    """columns: what the group has beyond what every group has · squares: of its rollouts' lengths, added up"""

    ordinal: int
    tokens: int
    nbytes: int
    start_version: Version
    digest: int
    columns: tuple[str, ...] = ()
    squares: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """A leased task, or a ready group that a stage refused."""

    ordinal: int
    reason: str


# ---------------------------------------------------------------------- stages


@dataclass(frozen=True, slots=True)
class StageLeased:
    """`grant` as in `Leased`."""

    stage: str
    ordinal: int
    worker: str
    grant: int
    at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class StageReturned:
    """The group waits for the stage again. why: 'expired', 'given_back'."""

    stage: str
    ordinal: int
    why: str


@dataclass(frozen=True, slots=True)
class StageCommitted:
    """The group has the stage's columns. version: of the policy that they depend on."""

    stage: str
    ordinal: int
    nbytes: int
    version: Version
    digest: int


# ---------------------------------------------------------------------- the learner


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
class StepAbandoned:
    """The step begins anew: `dropped` are DROPPED (a group that cannot be read), its other groups come back."""

    step: int
    dropped: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint of `version` is committed: the steps that it holds need not be kept."""

    version: Version


@dataclass(frozen=True, slots=True)
class LeadSet:
    """How far ahead of the learner generators may work from now on."""

    lead: Lead


@dataclass(frozen=True, slots=True)
class Collected:
    """Groups of an unbounded stream that the learner has got: they have ended."""

    ordinals: tuple[int, ...]


Event = (
    StreamOpened
    | Rewound
    | SteppedBack
    | Forked
    | Recovered
    | Drained
    | Finished
    | Submitted
    | Exhausted
    | Leased
    | Renewed
    | Requeued
    | Progressed
    | Committed
    | Dropped
    | StageLeased
    | StageReturned
    | StageCommitted
    | StepClaimed
    | StepTrained
    | StepRejected
    | StepAbandoned
    | Checkpointed
    | LeadSet
    | Collected
)
