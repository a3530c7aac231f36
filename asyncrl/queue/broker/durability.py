"""The storage of a queue, as configured.

queue.store   journal         payloads ready or claimed      payloads kept for a rewind only
memory        none            in memory                      in memory, then files without a name
file          <folder>        the same, durable: payload     the same, durable: payload
redis         Redis           also in files, or in Redis     in files, or in Redis
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.schema import QueueConfig
from asyncrl.queue.broker.records import CODEC
from asyncrl.queue.broker.recovery import Recovery
from asyncrl.queue.storage.file_journal import FileJournal
from asyncrl.queue.storage.file_payloads import FilePayloads
from asyncrl.queue.storage.journal import Journal, NoJournal
from asyncrl.queue.storage.redis_journal import RedisJournal
from asyncrl.queue.storage.redis_payloads import RedisPayloads
from asyncrl.queue.storage.redis_run import RedisRun
from asyncrl.queue.storage.store import PayloadBackend, PayloadStore


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
        journal = FileJournal(folder, run, CODEC.schema, fsync=config.fsync)  # first: it keeps others out
        if config.durable == "payload":
            backend = FilePayloads(folder / "payloads", fsync=config.fsync)
    elif config.store == "redis":
        assert config.redis_url is not None
        place = RedisRun(config.redis_url, run)
        journal = RedisJournal(place, CODEC.schema)
        if config.durable == "payload":
            backend = RedisPayloads(place)
    durable = backend is not None
    store = PayloadStore(
        backend or FilePayloads(folder, lasting=False), durable=durable, cool_bytes=config.retained_bytes
    )
    return Recovery(run, journal, store, now=now, anew=anew)
