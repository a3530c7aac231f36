"""Lets a queue survive the death of its broker: its decisions go into a journal, its payloads into a store.

    requests ─▸ handlers ── records ──▸ journal ┐
                   └────── payloads ──▸ store ──┴─ flush ─▸ only now are the replies sent

    the next broker:   journal ─▸ replay ─▸ the queue as it was ─▸ groups without a payload are made again

Payloads are flushed before the journal that mentions them: a group that is ready in the journal has its payload, or
lost it with its machine. Leases begin anew, so that workers that are still busy have time to renew them.

queue.store   journal         payloads ready or claimed      payloads kept for a rewind only
memory        none            in memory                      in memory, then files without a name
file          <folder>        the same, durable: payload     the same, durable: payload
redis         Redis           also in files, or in Redis     in files, or in Redis
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.schema import QueueConfig
from asyncrl.queue.broker.clock import LeaseClock
from asyncrl.queue.broker.queue_state import QueueState
from asyncrl.queue.ledger.events import Renewed
from asyncrl.queue.storage.file_journal import FileJournal
from asyncrl.queue.storage.file_payloads import FilePayloads
from asyncrl.queue.storage.journal import Journal, NoJournal
from asyncrl.queue.storage.records import (
    SCHEMA,
    Closed,
    Happened,
    Posted,
    Record,
    StreamState,
    TasksKept,
    decode_record,
    encode_record,
)
from asyncrl.queue.storage.records_before import SCHEMA_BEFORE, decode_before
from asyncrl.queue.storage.redis_journal import RedisJournal
from asyncrl.queue.storage.redis_payloads import RedisPayloads
from asyncrl.queue.storage.redis_run import RedisRun
from asyncrl.queue.storage.store import PayloadBackend, PayloadKey, PayloadStore

log = logging.getLogger(__name__)

TASKS_AT_ONCE = 1024
"""Tasks in one record of a snapshot."""


class Recovery:
    """The queue of run `run` as its journal and its store hold it; new if they are empty.

    anew: their contents are forgotten. A run that is closed is over: the next one begins anew in any case.
    """

    def __init__(
        self, run: str, journal: Journal, store: PayloadStore, *, now: float, anew: bool = False
    ) -> None:
        self._journal, self._store = journal, store
        self.queue = QueueState(run, store=store) if anew else self._replayed(run)
        if anew or self.queue.closed is not None:
            self.queue = QueueState(run, store=store)
            self._journal.compact(())
        elif self._journal.outdated:
            self._compact()
        self.recovered = bool(self.queue.streams)
        if not isinstance(journal, NoJournal):
            self.queue.note = self._note
        self.queue.clock = LeaseClock.at(now)
        self._recover(now)
        self.flush()

    def flush(self) -> None:
        """Make all decisions so far durable; their replies may be sent."""
        self._store.tidy()
        self._store.flush()
        self._journal.flush()
        if self._journal.overgrown:
            self._compact()

    def close(self) -> None:
        """Release journal and store for another broker."""
        self._store.close()
        self._journal.close()

    # ------------------------------------------------------------------ writing

    def _note(self, record: Record) -> None:
        # A recovery gives all leases a new deadline anyway, and nothing is as frequent as their renewal.
        if not (isinstance(record, Happened) and isinstance(record.event, Renewed)):
            self._journal.append(encode_record(record))

    def _compact(self) -> None:
        self._journal.compact(encode_record(record) for record in self._snapshot())

    def _snapshot(self) -> Iterator[Record]:
        for name, stream in self.queue.streams.items():
            yield StreamState(name, stream.ledger.state)
            tasks = list(stream.tasks.items())
            for at in range(0, len(tasks), TASKS_AT_ONCE):
                yield TasksKept(name, tuple(tasks[at : at + TASKS_AT_ONCE]))
        for key, value in self.queue.registry.items():
            yield Posted(key, value)
        if self.queue.closed is not None:
            yield Closed(self.queue.closed)

    # ------------------------------------------------------------------ reading

    def _replayed(self, run: str) -> QueueState:
        queue = QueueState(run, store=self._store)
        for packed in self._journal.replay():
            match decode_before(packed) if self._journal.outdated else decode_record(packed):
                case Happened(stream, event):
                    queue.add_stream(stream).replay(event)
                case TasksKept(stream, tasks):
                    queue.add_stream(stream).tasks.update(tasks)
                case StreamState(stream, state):
                    queue.add_stream(stream).ledger.state = state
                case Posted(key, value):
                    queue.registry[key] = value
                case Closed(reason):
                    queue.closed = reason
        return queue

    def _recover(self, now: float) -> None:
        """Drop stored payloads that nobody needs, and report the missing ones to the ledgers."""
        stored = self._store.recovered()
        needed: set[PayloadKey] = set()
        for name, stream in self.queue.streams.items():
            lost: set[int] = set()
            for ordinal, part, stamp in stream.needed():
                key = PayloadKey(name, ordinal, part)
                if stamp == stored.get(key):
                    needed.add(key)
                else:
                    lost.add(ordinal)
            stream.ledger.recover(now, lost)
            if lost:
                log.warning(
                    "stream %s: the payloads of %d groups are lost and will be made again", name, len(lost)
                )
        for key in stored.keys() - needed:
            self._store.drop(*key)


def open_recovery(config: QueueConfig, run: str, folder: Path, *, now: float, anew: bool = False) -> Recovery:
    """The queue of run `run` as the last broker left it. folder: this run's own, on this machine.

    anew: forget that queue and begin with an empty one.

    Raises:
        JournalError: the journal is damaged or in use.
        ConfigError: key queue.redis_url.
        DeadlineError: there is no Redis.
    """
    journal: Journal = NoJournal()
    backend: PayloadBackend | None = None
    if config.store == "file":
        # First: it keeps others out.
        journal = FileJournal(folder, run, SCHEMA, SCHEMA_BEFORE, fsync=config.fsync)
        if config.durable == "payload":
            backend = FilePayloads(folder / "payloads", fsync=config.fsync)
    elif config.store == "redis":
        assert config.redis_url is not None
        place = RedisRun(config.redis_url, run, room=config.max_bytes if config.durable == "payload" else 0)
        journal = RedisJournal(place, SCHEMA, SCHEMA_BEFORE)
        if config.durable == "payload":
            backend = RedisPayloads(place)
    durable = backend is not None
    store = PayloadStore(
        backend or FilePayloads(folder, lasting=False), durable=durable, cool_bytes=config.retained_bytes
    )
    return Recovery(run, journal, store, now=now, anew=anew)
