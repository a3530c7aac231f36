"""Handlers of the learner's requests: opening a stream, claims, and the end of each step."""

from __future__ import annotations

from asyncrl.errors import WireError
from asyncrl.queue.broker.queue_state import MAX_REASON, Context, QueueState, Reply
from asyncrl.queue.broker.stream import groups_reply
from asyncrl.queue.ledger import learner_commands
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.protocol.settings import Frontier
from asyncrl.queue.wire import wire


def open_stream(queue: QueueState, request: rq.OpenRequest, context: Context) -> Reply:
    """All streams of a run share one lineage: a rewind of one forks the others."""
    stream, frontier = queue.stream(request.stream), None
    if request.snapshot is not None:
        try:
            frontier = Frontier.from_wire(wire.unpack(request.snapshot))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise WireError(f"open: {error}") from error
    lineage = max(each.ledger.state.lineage for each in queue.streams.values())
    opener = "" if request.call is None else f"{context.session} {request.call}"
    stream.ledger.open(request.settings, frontier, lineage, opener)
    state = stream.ledger.state
    for other in queue.streams.values():
        if other.ledger.state.settings is not None:
            other.ledger.fork(state.lineage)
    return Reply({"learner_epoch": state.learner_epoch, "lineage": state.lineage, "version": state.version})


def claim(queue: QueueState, request: rq.ClaimRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    claimed = learner_commands.claim(stream.ledger, request)
    if claimed is None:
        return Reply() if context.late else None
    value = {"last": claimed.last, "so_far": claimed.so_far, "attempt": claimed.attempt}
    return Reply(*groups_reply(stream.contents(claimed.ordinals), value))


def trained(queue: QueueState, request: rq.TrainedRequest, context: Context) -> Reply:
    ledger = queue.stream(request.stream).ledger
    version = learner_commands.trained(ledger, request)
    return Reply({"version": version, "stats": queue.workers, "depth": ledger.counts(context.now)})


def reject(queue: QueueState, request: rq.RejectRequest, context: Context) -> Reply:
    ledger, reason = queue.stream(request.stream).ledger, request.reason[:MAX_REASON]
    return Reply(learner_commands.reject(ledger, request.learner_epoch, request.step, reason))


def abandon(queue: QueueState, request: rq.AbandonRequest, context: Context) -> Reply:
    ledger, reason = queue.stream(request.stream).ledger, request.reason[:MAX_REASON]
    return Reply(learner_commands.abandon(ledger, request, reason))


def checkpointed(queue: QueueState, request: rq.CheckpointedRequest, context: Context) -> Reply:
    ledger = queue.stream(request.stream).ledger
    learner_commands.checkpointed(ledger, request.learner_epoch, request.version)
    return Reply()


def collect(queue: QueueState, request: rq.CollectRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    contents = stream.contents(learner_commands.collect(stream.ledger, request))
    return Reply(*groups_reply(contents, {})) if contents or context.late else None


def snapshot(queue: QueueState, request: rq.SnapshotRequest, context: Context) -> Reply:
    frontier = learner_commands.frontier(queue.stream(request.stream).ledger, request.learner_epoch)
    return Reply(wire.pack(frontier.to_wire()))


HANDLERS = {
    rq.OpenRequest: open_stream,
    rq.ClaimRequest: claim,
    rq.TrainedRequest: trained,
    rq.RejectRequest: reject,
    rq.AbandonRequest: abandon,
    rq.CheckpointedRequest: checkpointed,
    rq.CollectRequest: collect,
    rq.SnapshotRequest: snapshot,
}
