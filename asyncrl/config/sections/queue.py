"""The section `queue`: how groups travel to the learner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.addresses import has_port, listening_rule, stays_here
from asyncrl.config.rules import Amount, AnyBytes, Bytes, Count, Rule, Seconds, Section, key, redis_url_rule


@dataclass(frozen=True)
class QueueConfig(Section):
    address: str = key(
        "tcp://127.0.0.1:*", "of the broker; * picks a free port, which a queue that starts again keeps"
    )
    max_staleness: Amount = key(
        2, "η: versions between the oldest token of a group and the policy it trains; 0 = synchronous"
    )
    window: Count | None = key(
        None,
        "W: groups past the oldest untrained one that may be trained first; none: 1 (strict order) up to η = "
        "1, else batch.groups + 1",
    )
    depth: Count | None = key(
        None, "groups leased, ready or claimed ahead at once; none: (η + 1) * batch.groups"
    )
    max_bytes: Bytes = key(4 << 30, "payload bytes held by the queue")
    wait_share: float | None = key(
        None,
        "share of its time that the learner may wait for groups: generators work ahead no more than that "
        "takes, so data is fresher than η; none: as far as η allows",
    )
    retained_bytes: AnyBytes = key(
        1 << 30, "payload bytes kept for a rewind only that stay in memory; more go to the disk"
    )
    store: Literal["memory", "file", "redis"] = key(
        "file",
        "what a queue that dies leaves to the next: nothing, or a journal in the run folder or in Redis, to "
        "go on from",
    )
    durable: Literal["metadata", "payload"] = key(
        "metadata", "metadata: ready groups are generated again; payload: kept"
    )
    fsync: bool = key(False, "survive a power failure too, not only the end of the process (store: file)")
    redis_url: str | None = key(
        None,
        "redis://, rediss:// (TLS) or unix://, with user:password@ as needed; "
        "redis+sentinel://HOST:PORT,HOST:PORT/PRIMARY/DB[?replicas=1] for a primary that may be replaced",
    )
    lease_s: Seconds | None = key(
        None,
        "a lease not renewed for this long goes back to pending; none: 3 * generator.heartbeat_s, but 6 at least",
    )
    hedge_s: Seconds | None = key(
        300.0,
        "a task that the learner may wait for, leased for longer than this, is leased to a second worker too, and the "
        "first group counts; none: never",
    )
    deadline_s: Seconds = key(60.0, "of every request to the queue")
    keys: str | None = key(
        None,
        "folder made by `asyncrl keys`: only its owners may talk to the broker, and encrypted; none: anybody "
        "may, so that the address must be on loopback",
        home=True,
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.address.partition("://")[0] in ("tcp", "ipc", "inproc"),
            "address",
            "has no tcp://, ipc:// or inproc:// before it",
            f"set queue.address=tcp://{self.address.rpartition('://')[2] or '127.0.0.1:*'}",
        )
        yield Rule(
            has_port(self.address),
            "address",
            "has no host with a port up to 65535 behind it",
            f"write {at}.address=tcp://HOST:PORT, where PORT may be *, and an IPv6 address in brackets",
        )
        safe = "://" not in self.address or stays_here(self.address)
        yield listening_rule("address", safe, self.keys)
        yield Rule(
            self.wait_share is None or 0 < self.wait_share < 1,
            "wait_share",
            "is a share of the learner's time, between 0 and 1",
            "set queue.wait_share=0.05",
        )
        yield from self._store_rules(at)

    def _store_rules(self, at: str) -> Iterator[Rule]:
        yield redis_url_rule(at, self.redis_url)
        yield Rule(
            (self.redis_url is not None) == (self.store == "redis"),
            "redis_url",
            "goes with queue.store=redis, and only with that",
            "set queue.store=redis queue.redis_url=redis://127.0.0.1:6379/0",
        )
        yield Rule(
            self.store != "memory" or self.durable == "metadata",
            "durable",
            "a queue that keeps nothing cannot keep payloads",
            "set queue.store=file",
        )
        yield Rule(
            not self.fsync or self.store == "file",
            "fsync",
            "is for files"
            + ("; a Redis server decides by its own appendfsync" if self.store == "redis" else ""),
            "set queue.store=file, or leave it out",
        )
