"""Limits that no queue on this machine can pass: one thread's copy, the disk with fsync, the ledger alone."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from asyncrl.queue.ledger import generator_commands, learner_commands
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.types import TRAIN

COPY_BYTES = 64 << 20
"""More than a cache holds."""

CHUNK_BYTES, CHUNKS = 32 << 20, 16
"""Written and made durable at once, as large as a burst of groups; how often."""

STEP, STEPS = 64, 200
HELD = 1 << 20


def memcpy_mb_per_s() -> float:
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    return COPY_BYTES / 1e6 / _seconds(lambda: np.copyto(target, source))


def disk_mb_per_s(folder: Path) -> float:
    """Written one after another to one file, each chunk followed by fsync."""
    chunk = os.urandom(CHUNK_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(CHUNKS):
            file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        return CHUNKS * CHUNK_BYTES / 1e6 / (time.perf_counter() - started)


def ledger_transitions_per_s() -> float:
    """PENDING ▸ LEASED ▸ READY ▸ CLAIMED ▸ TRAINED of each task: four transitions, of which two are events of its own.

    η = 8: some 500 tasks are leased or ready at any time.
    """
    settings = StreamSettings(
        groups_per_version=STEP,
        max_staleness=8,
        window=STEP + 1,
        depth=9 * STEP,
        max_bytes=1 << 40,
        lease_s=30.0,
    )
    ledger = Ledger(lambda event: None)
    ledger.open(settings, None)
    ledger.submit(0, (STEPS + 16) * STEP)
    started = time.perf_counter()
    for step in range(STEPS):
        _generate(ledger)
        _train(ledger, step)
    return 4 * STEPS * STEP / (time.perf_counter() - started)


def _generate(ledger: Ledger) -> None:
    """Lease and commit all that may be leased."""
    lineage = ledger.state.lineage
    request = rq.LeaseRequest(stream=TRAIN, held=HELD, lineage=lineage, most=8)
    while grants := generator_commands.lease(ledger, request, "worker", 0.0):
        for ordinal, epoch in grants:
            commit = rq.CommitRequest(
                stream=TRAIN,
                ordinal=ordinal,
                epoch=epoch,
                tokens=4096,
                nbytes=70_000,
                start_version=HELD,
                digest=ordinal,
                columns=("rewards",),
            )
            generator_commands.commit(ledger, commit)


def _train(ledger: Ledger, step: int) -> None:
    """Claim a step in one or more claims, and report it as trained and saved."""
    epoch = ledger.state.learner_epoch
    index, last = 0, False
    while not last:
        claim = rq.ClaimRequest(
            stream=TRAIN,
            learner_epoch=epoch,
            step=step,
            index=index,
            rank=0,
            max_tokens=8 * 4096,
            whole=False,
        )
        claimed = learner_commands.claim(ledger, claim)
        assert claimed is not None
        index, last = index + 1, claimed.last
    learner_commands.trained(ledger, rq.TrainedRequest(stream=TRAIN, learner_epoch=epoch, step=step))
    saved = rq.CheckpointedRequest(stream=TRAIN, learner_epoch=epoch, version=step + 1)
    learner_commands.checkpointed(ledger, saved)


def _seconds(work: Callable[[], object]) -> float:
    """The best of a few."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
