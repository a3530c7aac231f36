"""Handlers of the pools' requests: leases of one stage of a group, and the columns that it adds."""

from __future__ import annotations

from asyncrl.queue.broker.queue_state import MAX_REASON, Context, QueueState, Reply
from asyncrl.queue.broker.stream import flat_frames
from asyncrl.queue.ledger import generator_commands
from asyncrl.queue.protocol import requests as rq


def stage_lease(queue: QueueState, request: rq.StageLeaseRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    if stream.ledger.state.settings is None:
        return Reply([]) if context.late else None
    grants = generator_commands.stage_lease(stream.ledger, request, context.session, context.now)
    if not grants and not context.late:
        return None
    contents = stream.contents([grant.ordinal for grant in grants])
    value = [
        [grant.ordinal, grant.epoch, len(content.group), content.columns]
        for grant, content in zip(grants, contents, strict=True)
    ]
    return Reply(value, flat_frames(contents))


def stage_commit(queue: QueueState, request: rq.StageCommitRequest, context: Context) -> Reply:
    queue.stream(request.stream).stage_commit(request, context.frames)
    return Reply()


def stage_drop(queue: QueueState, request: rq.StageDropRequest, context: Context) -> Reply:
    ledger, reason = queue.stream(request.stream).ledger, request.reason[:MAX_REASON]
    generator_commands.drop(ledger, request.ordinal, request.epoch, reason, request.stage)
    return Reply()


HANDLERS = {
    rq.StageLeaseRequest: stage_lease,
    rq.StageCommitRequest: stage_commit,
    rq.StageDropRequest: stage_drop,
}
