"""The commands of the learner: claims, and the end of each step.

`learner_epoch` is that of the opening; after another opening it is fenced.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.ledger import LOST, Ledger
from asyncrl.queue.ledger.ledger_state import CORRUPT
from asyncrl.queue.ledger.rules.claims import next_claim
from asyncrl.queue.ledger.rules.lookahead import next_lead
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.protocol.settings import Frontier, StreamSettings
from asyncrl.types import Version


class Claimed(NamedTuple):
    """One rank's share of a claim. last: it completes the step. so_far: groups of the step up to here.

    attempt: goes with the step's further claims, which are refused if the step has begun anew since.
    """

    ordinals: tuple[int, ...]
    last: bool
    so_far: int
    attempt: int = 0


def claim(ledger: Ledger, request: rq.ClaimRequest) -> Claimed | None:
    """The rank's share of the `index`-th claim of the step; None: not yet.

    The first rank that requests it fixes the shares of all. whole=False takes the ready groups inside the window;
    whole=True takes the longest prefix in ordinal order, once it cannot grow any more. The last step of an
    exhausted stream may be short, and its last claim empty.

    Raises:
        RefusedError: 'exhausted', there are no groups for a further step. 'abandoned', the step has begun anew since
            the claim that returned `attempt`, or does so now, since the bytes of some of this share are lost.
    """
    settings, state = require_learner(ledger, request.learner_epoch), ledger.state
    step, index, rank = request.step, request.index, request.rank
    if not 0 <= rank < settings.learners or index < 0:
        raise RefusedError("malformed", f"claim {index} for rank {rank} of {settings.learners}")
    if step < state.version:
        raise RefusedError("trained", f"step {step} is over, the stream is at step {state.version}")
    if step > state.version:
        return None
    if index > len(state.claims) or request.attempt not in (None, state.attempt):
        raise RefusedError("abandoned", f"step {step} has begun anew, at claim 0")
    if index == len(state.claims):
        event = next_claim(state, request.max_tokens, request.whole)
        if event is None:
            return None
        ledger.apply(event)
    if ledger.has_lost(state.claims[index].shares[rank]):
        ledger.apply(ev.StepAbandoned(step, (), LOST))
        raise RefusedError("abandoned", f"groups of step {step} are lost, it has begun anew, at claim 0")
    later = sum(len(share) for each in state.claims[index + 1 :] for share in each.shares)
    so_far = state.claimed - later
    return Claimed(state.claims[index].shares[rank], state.claims[index].last, so_far, state.attempt)


def trained(ledger: Ledger, request: rq.TrainedRequest) -> Version:
    """The step's groups are TRAINED(step + 1) and that version counts as published. Idempotent.

    A step may be short of B groups only if it was before a rewind, or after a drain: nothing pending, leased
    or ready.
    """
    settings, state, step = require_learner(ledger, request.learner_epoch), ledger.state, request.step
    if step == state.version - 1:
        return state.version
    require_step(ledger, step)
    full = state.claimed >= settings.groups_per_version or (state.dry and state.claimed) or state.replayed
    if not full:
        raise RefusedError(
            "incomplete", f"step {step} has {state.claimed} of {settings.groups_per_version} groups"
        )
    repeated = step in state.replay
    ledger.apply(ev.StepTrained(step))
    if request.waited is not None and state.lead is not None and not repeated:
        lead = next_lead(state.lead, request.waited, settings)
        if lead != state.lead:
            ledger.apply(ev.LeadSet(lead))
    return state.version


def reject(ledger: Ledger, learner_epoch: int, step: int, reason: str) -> int:
    """The step's groups are DROPPED(reason); other groups take their place. Returns how many."""
    require_learner(ledger, learner_epoch)
    require_step(ledger, step)
    rejected = ledger.state.claimed
    if rejected:
        ledger.apply(ev.StepRejected(step, reason))
    return rejected


def abandon(ledger: Ledger, request: rq.AbandonRequest, reason: str) -> int:
    """The running step begins anew: its groups in `dropped` are DROPPED(reason), the others come back.

    Returns the attempt that the step is at now; a repetition with the same attempt changes nothing.
    """
    require_learner(ledger, request.learner_epoch)
    require_step(ledger, request.step)
    state = ledger.state
    claimed = {ordinal for each in state.claims for share in each.shares for ordinal in share}
    if request.attempt == state.attempt:
        if not claimed.issuperset(request.dropped):
            unknown = sorted(set(request.dropped) - claimed)
            raise RefusedError("unknown", f"{unknown} are not of step {request.step}")
        ledger.apply(ev.StepAbandoned(request.step, tuple(sorted(request.dropped)), reason))
    return state.attempt


def checkpointed(ledger: Ledger, learner_epoch: int, version: Version) -> None:
    """A checkpoint of `version` is committed: no rewind will go back to before it. Idempotent."""
    require_learner(ledger, learner_epoch)
    if version > ledger.state.version:
        raise RefusedError("step", f"the stream is at version {ledger.state.version}, not {version}")
    if version > ledger.state.retention.floor:
        ledger.apply(ev.Checkpointed(version))


def collect(ledger: Ledger, request: rq.CollectRequest) -> tuple[int, ...]:
    """All ready groups of an unbounded stream. Those that the last reply brought end with this request: `got` as
    TRAINED, `corrupt` as DROPPED."""
    settings, state = require_learner(ledger, request.learner_epoch), ledger.state
    if settings.max_staleness is not None:
        raise RefusedError("bounded", "groups of a bounded stream are claimed by step")
    ended = tuple(sorted({*request.got} & {*state.ready}))
    if ended:
        ledger.apply(ev.Collected(ended))
    for ordinal in sorted({*request.corrupt} & {*state.ready}):
        ledger.apply(ev.Dropped(ordinal, CORRUPT))
    return tuple(state.ready)


def frontier(ledger: Ledger, learner_epoch: int) -> Frontier:
    """Where the stream stands after the last trained step; later claims count as not made."""
    require_learner(ledger, learner_epoch)
    return ledger.state.as_frontier()


# ---------------------------------------------------------------------- checks


def require_learner(ledger: Ledger, learner_epoch: int) -> StreamSettings:
    settings, current = ledger.require_open(), ledger.state.learner_epoch
    if learner_epoch != current:
        raise RefusedError("fenced", f"learner epoch {learner_epoch} is over, {current} has the stream")
    return settings


def require_step(ledger: Ledger, step: int) -> None:
    if step != ledger.state.version:
        raise RefusedError("step", f"the stream is at step {ledger.state.version}, not {step}")
