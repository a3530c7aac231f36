"""The events of a stream: one frozen record of plain values per transition of the ledger.

The event log is the state: `Ledger.apply` of the same events on a fresh ledger gives the same ledger.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.queue.ledger.lookahead import Lookahead
from asyncrl.queue.protocol.settings import Frontier, StreamSettings
from asyncrl.types import Version

# ---------------------------------------------------------------------- opening, rewinding, ending


class StreamOpened(NamedTuple):
    settings: StreamSettings
    learner_epoch: int
    opener: str = ""


class Rewound(NamedTuple):
    """A learner came back at a checkpoint and the steps since are not kept: the stream is reset to `frontier`."""

    settings: StreamSettings
    learner_epoch: int
    lineage: int
    frontier: Frontier
    opener: str = ""


class SteppedBack(NamedTuple):
    """A learner came back at a checkpoint and the steps since are kept: they are claimed again as they were."""

    settings: StreamSettings
    learner_epoch: int
    lineage: int
    frontier: Frontier
    opener: str = ""


class Forked(NamedTuple):
    """Another stream of the run was rewound: leases of the abandoned lineage are void here too."""

    lineage: int


class Recovered(NamedTuple):
    """The broker came back: leases begin anew under its clock; the groups of `lost` have to be made again."""

    at: float
    deadline: float
    lost: tuple[int, ...]


class Drained(NamedTuple):
    """Pending tasks end as DROPPED(drained). Leased ones are finished; one whose worker is lost is leased again."""


class Finished(NamedTuple):
    reason: str


# ---------------------------------------------------------------------- the task feeder


class Submitted(NamedTuple):
    first: int
    tasks: int
    min_version: Version


class Exhausted(NamedTuple):
    """The feeder has no more tasks: the stream ends with those it was given, the last version maybe short."""


# ---------------------------------------------------------------------- generators


class Leased(NamedTuple):
    """`grant` counts the leases of the stream; the lease's fencing epoch is made of it and the lineage."""

    ordinal: int
    worker: str
    grant: int
    held: Version
    at: float
    deadline: float


class Hedged(NamedTuple):
    """A task that is leased already is leased to a second worker too. `grant` as in `Leased`."""

    ordinal: int
    worker: str
    grant: int
    held: Version
    at: float
    deadline: float


class HedgeEnded(NamedTuple):
    """One of a task's two leases is over, the other stands. why: as of `Requeued`, or 'lost': the other commits."""

    ordinal: int
    epoch: int
    why: str


class Renewed(NamedTuple):
    """Leases of tasks and stages alike were extended."""

    epochs: tuple[int, ...]
    deadline: float


class Requeued(NamedTuple):
    """LEASED back to PENDING. why: 'expired', 'unreachable' (the worker never saw its lease), 'given_back', 'stale'."""

    ordinal: int
    why: str


class Progressed(NamedTuple):
    """The finished part of a leased task is kept for its next lease; it replaces the part kept before."""

    ordinal: int
    nbytes: int


class Committed(NamedTuple):
    """columns: those that the group has beyond those of every group · squares: of its segments' lengths, added up"""

    ordinal: int
    tokens: int
    nbytes: int
    start_version: Version
    digest: int
    columns: tuple[str, ...] = ()
    squares: int = 0


class Dropped(NamedTuple):
    """A leased task, or a ready group that a stage refused."""

    ordinal: int
    reason: str


# ---------------------------------------------------------------------- stages


class StageLeased(NamedTuple):
    """`grant` as in `Leased`."""

    stage: str
    ordinal: int
    worker: str
    grant: int
    at: float
    deadline: float


class StageReturned(NamedTuple):
    """The group waits for the stage again. why: 'expired', 'unreachable', 'given_back'."""

    stage: str
    ordinal: int
    why: str


class StageCommitted(NamedTuple):
    """The group has the stage's columns. version: of the policy that they depend on."""

    stage: str
    ordinal: int
    nbytes: int
    version: Version
    digest: int


# ---------------------------------------------------------------------- the learner


class StepClaimed(NamedTuple):
    """The `number`-th claim of step `step`: shares[rank] are the ordinals that learner rank trains on.

    last: it completes the step.
    """

    step: int
    number: int
    shares: tuple[tuple[int, ...], ...]
    last: bool


class ClaimedAhead(NamedTuple):
    """The first claim of step `step`, the one after the running step, whose claims are all made. Its groups are AHEAD
    until that step makes this claim, before any other."""

    step: int
    shares: tuple[tuple[int, ...], ...]
    last: bool


class StepTrained(NamedTuple):
    """The step's groups are TRAINED and version step + 1 is published."""

    step: int


class StepRejected(NamedTuple):
    """The step's groups are DROPPED (a loss that is not finite) and the step begins anew."""

    step: int
    reason: str


class StepAbandoned(NamedTuple):
    """The step begins anew: `dropped` are DROPPED (a group that cannot be read), its other groups come back."""

    step: int
    dropped: tuple[int, ...]
    reason: str


class Checkpointed(NamedTuple):
    """A checkpoint of `version` is committed: the steps that it holds need not be kept."""

    version: Version


class LeadSet(NamedTuple):
    """A new limit on how far ahead of the learner generators may work."""

    lead: Lookahead


class Collected(NamedTuple):
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
    | Hedged
    | HedgeEnded
    | Renewed
    | Requeued
    | Progressed
    | Committed
    | Dropped
    | StageLeased
    | StageReturned
    | StageCommitted
    | StepClaimed
    | ClaimedAhead
    | StepTrained
    | StepRejected
    | StepAbandoned
    | Checkpointed
    | LeadSet
    | Collected
)

LATER = frozenset({"ClaimedAhead", "Hedged", "HedgeEnded", "Leases.hedged", "StreamSettings.hedge_s"})
"""Events, and fields with a default, that older journals lack. These are read all the same."""
