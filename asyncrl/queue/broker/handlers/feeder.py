"""Handlers of the task feeder's requests."""

from __future__ import annotations

from asyncrl.queue.broker.queue_state import Context, QueueState, Reply
from asyncrl.queue.protocol import requests as rq


def room(queue: QueueState, request: rq.RoomRequest, context: Context) -> Reply | None:
    ledger = queue.stream(request.stream).ledger
    wanted = ledger.room()
    return Reply([ledger.state.next, wanted]) if wanted or context.late else None


def submit(queue: QueueState, request: rq.SubmitRequest, context: Context) -> Reply | None:
    stream = queue.stream(request.stream)
    if stream.ledger.state.settings is None and not context.late:
        return None
    stream.submit(request)
    return Reply()


def exhaust(queue: QueueState, request: rq.ExhaustRequest, context: Context) -> Reply:
    queue.stream(request.stream).ledger.exhaust(request.at)
    return Reply()


HANDLERS = {rq.RoomRequest: room, rq.SubmitRequest: submit, rq.ExhaustRequest: exhaust}
