"""Handlers of the requests that every client makes: joining, leaving, the registry, leases."""

from __future__ import annotations

from asyncrl.errors import RefusedError
from asyncrl.queue.broker import queue_state
from asyncrl.queue.broker.queue_state import Context, QueueState, Reply, check_small
from asyncrl.queue.broker.records import Posted
from asyncrl.queue.ledger import generator_commands
from asyncrl.queue.protocol import requests as rq


def hello(queue: QueueState, request: rq.HelloRequest, context: Context) -> Reply:
    opened = [name for name, stream in queue.streams.items() if stream.ledger.state.settings is not None]
    return Reply({"run": queue.run, "streams": opened, "closed": queue.closed})


def goodbye(queue: QueueState, request: rq.GoodbyeRequest, context: Context) -> Reply:
    for stream in queue.streams.values():
        leases = generator_commands.leases_of(stream.ledger, context.session)
        generator_commands.give_back(stream.ledger, leases)
    return Reply()


def post(queue: QueueState, request: rq.PostRequest, context: Context) -> Reply:
    key, value = request.key, request.value
    if key not in queue.registry and len(queue.registry) >= queue_state.MAX_KEYS:
        raise RefusedError("full", f"the registry holds {queue_state.MAX_KEYS} keys already")
    check_small("value", value)
    queue.registry[key] = value
    queue.note(Posted(key, value))
    queue.posts += 1
    return Reply()


def lookup(queue: QueueState, request: rq.LookupRequest, context: Context) -> Reply | None:
    if request.key in queue.registry:
        return Reply({"found": True, "value": queue.registry[request.key]})
    return Reply({"found": False}) if context.late else None


def renew(queue: QueueState, request: rq.RenewRequest, context: Context) -> Reply:
    lost: list[tuple[str, int, int]] = []
    for name, leases in request.leases.items():
        stream = queue.streams.get(name)
        over = leases if stream is None else generator_commands.renew(stream.ledger, leases, context.now)
        lost += [(name, ordinal, epoch) for ordinal, epoch in over]
    check_small("stats", request.stats)
    if context.name in queue.workers or len(queue.workers) < queue_state.MAX_KEYS:
        queue.workers[context.name] = request.stats
    return Reply({"lost": lost, "closed": queue.closed is not None})


def give_back(queue: QueueState, request: rq.GiveBackRequest, context: Context) -> Reply:
    generator_commands.give_back(queue.stream(request.stream).ledger, request.leases)
    return Reply()


HANDLERS = {
    rq.HelloRequest: hello,
    rq.GoodbyeRequest: goodbye,
    rq.PostRequest: post,
    rq.LookupRequest: lookup,
    rq.RenewRequest: renew,
    rq.GiveBackRequest: give_back,
}
