"""The reply to each request: a handler for each verb, by sender, and what refusals become. No sockets and no clock.

A handler is a function (queue, request, context) ▸ Reply, or None: the request waits, and is handled again when its
stream changes (a lookup: when something is posted) or when it is late. Verbs that only change the ledger are handled by
the ledger's command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from asyncrl.errors import RefusedError, RunClosedError, WireError
from asyncrl.queue.broker.queue_state import Context, QueueState, Reply, SessionRequest, check_small
from asyncrl.queue.broker.stream import (
    COLUMN,
    NOT_COMPARED,
    PROGRESS,
    Stream,
    flat_frames,
    groups_reply,
)
from asyncrl.queue.ledger import generator_commands, learner_commands
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.queue.ledger.state.tasks import TAKEN, State
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.protocol.settings import Frontier
from asyncrl.queue.storage.records import Closed, Posted
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.envelope import REPLY_FRAMES, ReplyRoom

COLUMN_FRAMES = 2
"""Frames of the columns of one stage (wire/columns.py)."""

GRANT_BYTES = 64
"""More than a granted task takes in a reply besides its own bytes."""

LARGE = "large"
"""The reason of what no reply has room for."""

Handler = Callable[[QueueState, Any, Context], "Reply | None"]


def handle(queue: QueueState, incoming: SessionRequest, now: float, late: bool = False) -> Reply | None:
    """The reply, or None: the request has to wait (never when `late`). Refusals are counted."""
    request = incoming.request
    try:
        if incoming.run != queue.run and not request.of_any_run:
            raise RefusedError("wrong_run", f"this queue serves run {queue.run!r}, not {incoming.run!r}")
        if queue.closed is not None and request.ends_with_run:
            raise RunClosedError(queue.closed)
        context = Context(incoming.session, incoming.frames, now, late)
        return HANDLERS[type(request)](queue, request, context)
    except (RefusedError, RunClosedError, WireError) as error:
        return refusal(queue, error)


def refusal(queue: QueueState, error: RefusedError | RunClosedError | WireError) -> Reply:
    """The reply that reports an error; all but the end of the run are counted."""
    if isinstance(error, RefusedError):
        queue.refused[error.reason] += 1
        return Reply(error=("refused", error.reason, error.detail))
    if isinstance(error, RunClosedError):
        return Reply(error=("closed", "", str(error)))
    queue.refused["malformed"] += 1
    return Reply(error=("wire", "", str(error)))


# ---------------------------------------------------------------------- every client


def hello(queue: QueueState, request: rq.HelloRequest, context: Context) -> Reply:
    opened = [name for name, stream in queue.streams.items() if stream.ledger.state.settings is not None]
    mark = "" if queue.traces is None else queue.traces.mark
    now = {"time": queue.time(), "trace": mark}
    return Reply({"run": queue.run, "streams": opened, "closed": queue.closed, **now})


def goodbye(queue: QueueState, request: rq.GoodbyeRequest, context: Context) -> Reply:
    for stream in queue.streams.values():
        generator_commands.give_back(stream.ledger, stream.ledger.state.leases.of(context.session))
    return Reply()


def post(queue: QueueState, request: rq.PostRequest, context: Context) -> Reply:
    queue.post(request.key, request.value)
    queue.note(Posted(request.key, request.value))
    return Reply()


def lookup(queue: QueueState, request: rq.LookupRequest, context: Context) -> Reply | None:
    if request.key in queue.registry:
        return Reply({"found": True, "value": queue.registry[request.key]})
    return Reply({"found": False}) if context.late else None


def trace(queue: QueueState, request: rq.TraceRequest, context: Context) -> Reply:
    """Rows that nobody takes count as taken: the sender need not keep them."""
    taken = not request.rows or queue.traces is None or queue.traces.take(request.process, request.rows)
    return Reply({"time": queue.time(), "taken": taken})


def renew(queue: QueueState, request: rq.RenewRequest, context: Context) -> Reply:
    lost: list[tuple[str, int, int]] = []
    for name, leases in request.leases.items():
        stream = queue.streams.get(name)
        over = leases if stream is None else generator_commands.renew(stream.ledger, leases, context.now)
        lost += [(name, ordinal, epoch) for ordinal, epoch in over]
    check_small("stats", request.stats)
    if not queue.keep_stats(context.name, request.stats):
        queue.refused["full"] += 1
    return Reply({"lost": lost, "closed": queue.closed is not None})


# ---------------------------------------------------------------------- the operator


def status(queue: QueueState, request: rq.StatusRequest, context: Context) -> Reply:
    return Reply(
        {
            "run": queue.run,
            "started_at": queue.started_at,
            "closed": queue.closed,
            "refused": dict(queue.refused),
            "workers": queue.workers,
            "store": asdict(queue.store.sizes()),
            "directory": sorted(queue.registry),
            "streams": {name: _stream_status(stream, context.now) for name, stream in queue.streams.items()},
        }
    )


def peek(queue: QueueState, request: rq.PeekRequest, context: Context) -> Reply:
    """The state of a task, and its group if there is one. Nothing changes."""
    stream = queue.streams.get(request.stream)
    task = None if stream is None else stream.ledger.state.tasks.records.get(request.ordinal)
    if stream is None or task is None:
        raise RefusedError(
            "unknown",
            f"stream {request.stream!r} has no task {request.ordinal}: not submitted yet, or it has ended",
        )
    lease = stream.ledger.state.leases.get(request.ordinal, task.epoch)
    value = {
        "state": task.state.value,
        "task": stream.tasks.get(request.ordinal),
        "worker": lease.worker.rsplit("/", 1)[0] if lease else None,
        "since_s": context.now - lease.at if lease else None,
    }
    made = (task.state is State.READY or task.state in TAKEN) and not task.lost
    return Reply(*groups_reply(stream.contents([request.ordinal]) if made else [], value))


def finish(queue: QueueState, request: rq.FinishRequest, context: Context) -> Reply:
    if queue.closed is None:
        queue.closed = request.reason
        queue.note(Closed(queue.closed))
        queue.posts += 1
        for stream in queue.streams.values():
            stream.ledger.finish(queue.closed)
    return Reply()


def _stream_status(stream: Stream, now: float) -> dict[str, Any]:
    state = stream.ledger.state
    return {
        **stream.ledger.counts(now),
        "version": state.steps.version,
        "lineage": state.lineage,
        "learner_epoch": state.learner_epoch,
        "next_ordinal": state.tasks.next,
        "settings": None if state.settings is None else asdict(state.settings),
    }


# ---------------------------------------------------------------------- the task feeder


def room(queue: QueueState, request: rq.RoomRequest, context: Context) -> Reply | None:
    ledger = queue.stream(request.stream).ledger
    wanted = ledger.room()
    return Reply([ledger.state.tasks.next, wanted]) if wanted or context.late else None


def submit(queue: QueueState, request: rq.SubmitRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    if stream.ledger.state.settings is None and not context.late:
        return None
    stream.submit(request)
    return Reply()


def scores(queue: QueueState, request: rq.ScoresRequest, context: Context) -> Reply:
    return Reply(queue.stream(request.stream).scores_since(request.since))


# ---------------------------------------------------------------------- generators


def lease(queue: QueueState, request: rq.LeaseRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    if stream.ledger.state.settings is None:
        return Reply([]) if context.late else None
    room, progress = ReplyRoom(), []

    def fits(ordinal: int) -> bool:
        frames = stream.progress_of(ordinal)
        if not room.take(len(frames), len(stream.tasks[ordinal]) + sum(map(len, frames)) + GRANT_BYTES):
            return False
        progress.append(frames)
        return True

    grants = generator_commands.lease(stream.ledger, request, context.session, context.now, fits)
    if not grants and not context.late:
        return None
    value = [
        [grant.ordinal, grant.epoch, stream.tasks[grant.ordinal], len(frames)]
        for grant, frames in zip(grants, progress, strict=True)
    ]
    return Reply(value, [frame for frames in progress for frame in frames])


def progress(queue: QueueState, request: rq.ProgressRequest, context: Context) -> Reply:
    stream = queue.stream(request.stream)
    generator_commands.progress(stream.ledger, request)
    stream.put(request.ordinal, PROGRESS, context.frames, NOT_COMPARED)
    return Reply()


def commit(queue: QueueState, request: rq.CommitRequest, context: Context) -> Reply:
    if not context.frames:
        raise WireError(f"commit of ordinal {request.ordinal}: no payload")
    stream = queue.stream(request.stream)
    most = REPLY_FRAMES - COLUMN_FRAMES * len(stream.ledger.state.stages.by_name)
    if len(context.frames) > most:
        drop = rq.DropRequest(
            stream=request.stream, ordinal=request.ordinal, epoch=request.epoch, reason=LARGE
        )
        generator_commands.drop(stream.ledger, drop)
        raise RefusedError(
            LARGE, f"a group of {len(context.frames)} frames; a reply has room for {most}, columns aside"
        )
    if generator_commands.commit(stream.ledger, request):
        stream.put_group(request.ordinal, context.frames, request.digest, context.session)
        stream.note_score(request.ordinal, request.score)
    return Reply()


def drop(queue: QueueState, request: rq.DropRequest, context: Context) -> Reply:
    stream = queue.stream(request.stream)
    generator_commands.drop(stream.ledger, request)
    stream.note_score(request.ordinal, request.score)
    return Reply()


# ---------------------------------------------------------------------- stages


def stage_lease(queue: QueueState, request: rq.StageLeaseRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    if stream.ledger.state.settings is None:
        return Reply([]) if context.late else None
    room, contents = ReplyRoom(), []

    def fits(ordinal: int) -> bool:
        content = stream.content(ordinal)
        if not room.take(len(content.frames), stream.ledger.state.tasks.records[ordinal].nbytes):
            return False
        contents.append(content)
        return True

    grants = generator_commands.stage_lease(stream.ledger, request, context.session, context.now, fits)
    if not grants and not context.late:
        return None
    value = [
        [grant.ordinal, grant.epoch, len(content.group), content.columns]
        for grant, content in zip(grants, contents, strict=True)
    ]
    return Reply(value, flat_frames(contents))


def stage_commit(queue: QueueState, request: rq.StageCommitRequest, context: Context) -> Reply:
    if len(context.frames) > COLUMN_FRAMES:
        raise WireError(f"stage_commit of ordinal {request.ordinal}: columns of {len(context.frames)} frames")
    stream = queue.stream(request.stream)
    if generator_commands.stage_commit(stream.ledger, request):
        stream.put(request.ordinal, COLUMN + request.stage, context.frames, request.digest)
    return Reply()


# ---------------------------------------------------------------------- the learner


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
    return Reply(
        {"learner_epoch": state.learner_epoch, "lineage": state.lineage, "version": state.steps.version}
    )


def claim(queue: QueueState, request: rq.ClaimRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    claimed = learner_commands.claim(stream.ledger, request)
    if claimed is None:
        return Reply() if context.late else None
    value = {
        "last": claimed.last,
        "so_far": claimed.so_far,
        "attempt": claimed.attempt,
        "ahead": claimed.ahead,
        "share": len(claimed.ordinals),
        "share_ordinals": claimed.ordinals,
    }
    return Reply(*groups_reply(stream.contents(claimed.ordinals[request.received :]), value))


def trained(queue: QueueState, request: rq.TrainedRequest, context: Context) -> Reply:
    ledger = queue.stream(request.stream).ledger
    version = learner_commands.trained(ledger, request)
    return Reply({"version": version, "stats": queue.workers, "depth": ledger.counts(context.now)})


def collect(queue: QueueState, request: rq.CollectRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    contents = stream.contents(learner_commands.collect(stream.ledger, request))
    return Reply(*groups_reply(contents, {})) if contents or context.late else None


def snapshot(queue: QueueState, request: rq.SnapshotRequest, context: Context) -> Reply:
    frontier = learner_commands.snapshot(queue.stream(request.stream).ledger, request)
    return Reply(wire.pack(frontier.to_wire()))


# ---------------------------------------------------------------------- the table


def by_ledger(command: Callable[[Ledger, Any], Any]) -> Handler:
    """Handles a request that only changes the ledger; the result of the command is the reply."""
    return lambda queue, request, context: Reply(command(queue.stream(request.stream).ledger, request))


HANDLERS: dict[type[rq.Request], Handler] = {
    rq.HelloRequest: hello,
    rq.GoodbyeRequest: goodbye,
    rq.PostRequest: post,
    rq.LookupRequest: lookup,
    rq.RenewRequest: renew,
    rq.TraceRequest: trace,
    rq.GiveBackRequest: by_ledger(
        lambda ledger, request: generator_commands.give_back(ledger, request.leases)
    ),
    rq.StatusRequest: status,
    rq.PeekRequest: peek,
    rq.DrainRequest: by_ledger(lambda ledger, request: ledger.drain()),
    rq.FinishRequest: finish,
    rq.RoomRequest: room,
    rq.SubmitRequest: submit,
    rq.ScoresRequest: scores,
    rq.ExhaustRequest: by_ledger(lambda ledger, request: ledger.exhaust(request.at)),
    rq.LeaseRequest: lease,
    rq.ProgressRequest: progress,
    rq.CommitRequest: commit,
    rq.DropRequest: drop,
    rq.StageLeaseRequest: stage_lease,
    rq.StageCommitRequest: stage_commit,
    rq.StageDropRequest: by_ledger(generator_commands.drop),
    rq.OpenRequest: open_stream,
    rq.ClaimRequest: claim,
    rq.TrainedRequest: trained,
    rq.RejectRequest: by_ledger(learner_commands.reject),
    rq.AbandonRequest: by_ledger(learner_commands.abandon),
    rq.CheckpointedRequest: by_ledger(learner_commands.checkpointed),
    rq.CollectRequest: collect,
    rq.SnapshotRequest: snapshot,
}
