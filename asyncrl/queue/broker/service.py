"""The reply to each request: the handler of its verb, and what refusals become. No sockets and no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.errors import RefusedError, RunClosedError, WireError
from asyncrl.queue.broker.handlers import everyone, feeder, generator, learner, operator, stage
from asyncrl.queue.broker.queue_state import Context, QueueState, Reply, SessionRequest
from asyncrl.queue.protocol.requests import Request

Handler = Callable[[QueueState, Any, Context], "Reply | None"]

HANDLERS: dict[type[Request], Handler] = {
    request: handler
    for module in (everyone, operator, feeder, generator, stage, learner)
    for request, handler in module.HANDLERS.items()
}


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
