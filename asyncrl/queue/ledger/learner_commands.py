"""The commands of the learner: claims, and the end of each step.

`learner_epoch` is that of the opening; after another opening it is fenced.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.claims import claim_ahead, next_claim
from asyncrl.queue.ledger.ledger import LOST, MAX_REASON, Ledger
from asyncrl.queue.ledger.lookahead import next_lead
from asyncrl.queue.ledger.state.tasks import CORRUPT
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.protocol.settings import Frontier, StreamSettings
from asyncrl.types import Version


class Claimed(NamedTuple):
    """One rank's share of a claim. last: it completes the step. so_far: groups of the step up to here.

    attempt: goes with the step's further claims, which are refused if the step has begun anew since.
    ahead: the step before still runs. The same claim must be requested again with `attempt` once the step runs.
    """

    ordinals: tuple[int, ...]
    last: bool
    so_far: int
    attempt: int = 0
    ahead: bool = False


def claim(ledger: Ledger, request: rq.ClaimRequest) -> Claimed | None:
    """The rank's share of the `index`-th claim of the step; None: not yet.

    The first rank that requests it fixes the shares of all. whole=False takes the ready groups inside the window;
    whole=True takes the longest run of ready groups in ordinal order, once no group can be added to it. The last step
    of an exhausted stream may be short, and its last claim empty.

    Raises:
        RefusedError: 'exhausted', there are no groups for a further step. 'abandoned', the step has begun anew since
            the claim that returned `attempt`, or does so now, since the bytes of some of this share are lost.
    """
    settings, state = require_learner(ledger, request.learner_epoch), ledger.state
    steps, step, index, rank = state.steps, request.step, request.index, request.rank
    if not 0 <= rank < settings.learners or index < 0:
        raise RefusedError("malformed", f"claim {index} for rank {rank} of {settings.learners}")
    if step < steps.version:
        raise RefusedError("trained", f"step {step} is over, the stream is at step {steps.version}")
    if step > steps.version:
        return _claim_ahead(ledger, request) if request.ahead else None
    if index > len(steps.claims) or request.attempt not in (None, steps.attempt):
        raise RefusedError("abandoned", f"step {step} has begun anew, at claim 0")
    if index == len(steps.claims):
        event = next_claim(state, request.max_tokens, request.whole)
        if event is None:
            return None
        ledger.apply(event)
    claimed = steps.claims[index]
    if ledger.has_lost(claimed.shares[rank][request.received :]):
        ledger.apply(ev.StepAbandoned(step, (), LOST))
        raise RefusedError("abandoned", f"groups of step {step} are lost, it has begun anew, at claim 0")
    later = sum(len(share) for each in steps.claims[index + 1 :] for share in each.shares)
    return Claimed(claimed.shares[rank], claimed.last, steps.claimed - later, steps.attempt)


def _claim_ahead(ledger: Ledger, request: rq.ClaimRequest) -> Claimed | None:
    """The rank's share of the first claim of the next step, if that is made. Rank 0 alone makes it: the request of each
    waiting rank is tried whenever a group comes."""
    state, step, rank = ledger.state, request.step, request.rank
    steps = state.steps
    if request.attempt not in (None, steps.attempt):
        raise RefusedError("abandoned", f"step {steps.version} has begun anew, and with it step {step}")
    if step != steps.version + 1 or request.index > 0 or request.whole or not steps.complete:
        return None
    if step not in steps.replay and rank == 0:
        event = claim_ahead(state, request.max_tokens)
        if event is not None:
            ledger.apply(event)
    if not state.ahead:
        return None
    first = steps.replay[step].claims[0]
    if ledger.has_lost(first.shares[rank][request.received :]):
        return None  # it is refused once the step runs
    return Claimed(first.shares[rank], first.last, sum(map(len, first.shares)), steps.attempt, ahead=True)


def trained(ledger: Ledger, request: rq.TrainedRequest) -> Version:
    """The step's groups are TRAINED(step + 1) and that version counts as published. Idempotent.

    A step may be short of B groups only if it was before a rewind, or after a drain: nothing pending, leased
    or ready.
    """
    settings, state, step = require_learner(ledger, request.learner_epoch), ledger.state, request.step
    steps = state.steps
    if step == steps.version - 1:
        return steps.version
    require_step(ledger, step)
    full = steps.claimed >= settings.groups_per_version or (state.dry and steps.claimed) or steps.replayed
    if not full:
        raise RefusedError(
            "incomplete", f"step {step} has {steps.claimed} of {settings.groups_per_version} groups"
        )
    repeated = steps.replayed
    ledger.apply(ev.StepTrained(step))
    if request.waited is not None and state.lead is not None and not repeated:
        lead = next_lead(state.lead, request.waited, settings)
        if lead != state.lead:
            ledger.apply(ev.LeadSet(lead))
    return steps.version


def reject(ledger: Ledger, request: rq.RejectRequest) -> int:
    """The step's groups are DROPPED(reason); other groups take their place. Returns how many."""
    require_learner(ledger, request.learner_epoch)
    require_step(ledger, request.step)
    rejected = ledger.state.steps.claimed
    if rejected:
        ledger.apply(ev.StepRejected(request.step, request.reason[:MAX_REASON]))
    return rejected


def abandon(ledger: Ledger, request: rq.AbandonRequest) -> int:
    """The running step begins anew: its groups in `dropped` are DROPPED(reason), the others come back.

    Returns the attempt that the step is at now; a repetition with the same attempt changes nothing.
    """
    require_learner(ledger, request.learner_epoch)
    require_step(ledger, request.step)
    steps, dropped = ledger.state.steps, tuple(sorted(request.dropped))
    if request.attempt == steps.attempt:
        unknown = sorted({*dropped} - steps.claimed_ordinals())
        if unknown:
            raise RefusedError("unknown", f"{unknown} are not of step {request.step}")
        ledger.apply(ev.StepAbandoned(request.step, dropped, request.reason[:MAX_REASON]))
    return steps.attempt


def checkpointed(ledger: Ledger, request: rq.CheckpointedRequest) -> None:
    """A checkpoint of `version` is committed: no rewind will go back to before it. Idempotent."""
    require_learner(ledger, request.learner_epoch)
    steps, version = ledger.state.steps, request.version
    if version > steps.version:
        raise RefusedError("step", f"the stream is at version {steps.version}, not {version}")
    if version > steps.retained.floor:
        ledger.apply(ev.Checkpointed(version))


def collect(ledger: Ledger, request: rq.CollectRequest) -> tuple[int, ...]:
    """All ready groups of an unbounded stream. Those that the last reply brought end with this request: `got` as
    TRAINED, `corrupt` as DROPPED."""
    settings, state = require_learner(ledger, request.learner_epoch), ledger.state
    if settings.max_staleness is not None:
        raise RefusedError("bounded", "groups of a bounded stream are claimed by step")
    ended = tuple(sorted({*request.got} & {*state.tasks.ready}))
    if ended:
        ledger.apply(ev.Collected(ended))
    for ordinal in sorted({*request.corrupt} & {*state.tasks.ready}):
        ledger.apply(ev.Dropped(ordinal, CORRUPT))
    return tuple(state.tasks.ready)


def snapshot(ledger: Ledger, request: rq.SnapshotRequest) -> Frontier:
    """Where the stream stands after the last trained step; later claims count as not made."""
    require_learner(ledger, request.learner_epoch)
    return ledger.state.as_frontier()


# ---------------------------------------------------------------------- checks


def require_learner(ledger: Ledger, learner_epoch: int) -> StreamSettings:
    settings, current = ledger.require_open(), ledger.state.learner_epoch
    if learner_epoch != current:
        raise RefusedError("fenced", f"learner epoch {learner_epoch} is over, {current} has the stream")
    return settings


def require_step(ledger: Ledger, step: int) -> None:
    version = ledger.state.steps.version
    if step != version:
        raise RefusedError("step", f"the stream is at step {version}, not {step}")
