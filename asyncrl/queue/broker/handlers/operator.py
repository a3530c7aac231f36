"""Handlers of the operator's requests: looking at a run, draining it, ending it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from asyncrl.errors import RefusedError
from asyncrl.queue.broker.queue_state import Context, QueueState, Reply
from asyncrl.queue.broker.records import Closed
from asyncrl.queue.broker.stream import Stream, groups_reply
from asyncrl.queue.ledger.task_record import State
from asyncrl.queue.protocol import requests as rq


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
    task = None if stream is None else stream.ledger.state.items.get(request.ordinal)
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
    made = task.state in (State.READY, State.CLAIMED, State.RECORDED) and not task.lost
    return Reply(*groups_reply(stream.contents([request.ordinal]) if made else [], value))


def drain(queue: QueueState, request: rq.DrainRequest, context: Context) -> Reply:
    return Reply(queue.stream(request.stream).ledger.drain())


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
        "version": state.version,
        "lineage": state.lineage,
        "learner_epoch": state.learner_epoch,
        "next_ordinal": state.next,
        "settings": None if state.settings is None else asdict(state.settings),
    }


HANDLERS = {
    rq.StatusRequest: status,
    rq.PeekRequest: peek,
    rq.DrainRequest: drain,
    rq.FinishRequest: finish,
}
