"""Handlers of the generators' requests: leases of tasks, and their groups."""

from __future__ import annotations

from asyncrl.errors import WireError
from asyncrl.queue.broker.queue_state import MAX_REASON, Context, QueueState, Reply
from asyncrl.queue.ledger import generator_commands
from asyncrl.queue.protocol import requests as rq


def lease(queue: QueueState, request: rq.LeaseRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    if stream.ledger.state.settings is None:
        return Reply([]) if context.late else None
    grants = generator_commands.lease(stream.ledger, request, context.session, context.now)
    if not grants and not context.late:
        return None
    progress = [stream.progress_of(grant.ordinal) for grant in grants]
    value = [
        [grant.ordinal, grant.epoch, stream.tasks[grant.ordinal], len(frames)]
        for grant, frames in zip(grants, progress, strict=True)
    ]
    return Reply(value, [frame for frames in progress for frame in frames])


def progress(queue: QueueState, request: rq.ProgressRequest, context: Context) -> Reply:
    queue.stream(request.stream).progress(request, context.frames)
    return Reply()


def commit(queue: QueueState, request: rq.CommitRequest, context: Context) -> Reply:
    if not context.frames:
        raise WireError(f"commit of ordinal {request.ordinal}: no payload")
    queue.stream(request.stream).commit(request, context.frames)
    return Reply()


def drop(queue: QueueState, request: rq.DropRequest, context: Context) -> Reply:
    ledger, reason = queue.stream(request.stream).ledger, request.reason[:MAX_REASON]
    generator_commands.drop(ledger, request.ordinal, request.epoch, reason)
    return Reply()


HANDLERS = {
    rq.LeaseRequest: lease,
    rq.ProgressRequest: progress,
    rq.CommitRequest: commit,
    rq.DropRequest: drop,
}
