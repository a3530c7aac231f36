"""Log-probs of the reference, the policy as the job begins with it: computed once, before it moves.

    all pairs ─▸ the policy's log-probs ─▸ chosen − rejected, one number a pair ─▸ RUN/reference_margins.msgpack
                                                     │                                  │ after a resume
    a step's pairs ─▸ by the digest of their tokens ◂┴──────────────────────────────────┘

A second copy of the model would cost its memory and a third more work in every epoch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgpack
import torch
import xxhash

from asyncrl.errors import TaskError
from asyncrl.learner.backends.backend import Backend, exchange_per_data_rank
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training.experience import Experience
from asyncrl.offline.batches import Batches
from asyncrl.offline.objectives import REFERENCE, signed_sums
from asyncrl.system.disk import writing
from asyncrl.types import Task

FILE = "reference_margins.msgpack"


class ReferenceMargins:
    """log π_ref(chosen) − log π_ref(rejected) of each pair, on every rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._margins: dict[bytes, float] = {}

    def of(self, batch: MicroBatch) -> MicroBatch:
        """The pairs with their margins. Raises TaskError for one that is not known: the tasks have changed."""
        try:
            found = [self._margins[digest] for digest in _digests(batch)]
        except KeyError:
            raise TaskError(
                f"{self._path} lacks a pair of the tasks, which have changed since the job began; begin it anew under "
                "another run.name"
            ) from None
        return dataclasses.replace(batch, parts_R={**batch.parts_R, REFERENCE: torch.tensor(found)})

    def added_to(self, pairs: Batches) -> Batches:
        """The same batches with their margins."""
        return dataclasses.replace(pairs, finish=lambda batch: self.of(pairs.finish(batch)))

    def open(
        self,
        backend: Backend,
        experience: Experience,
        asked: Iterable[tuple[Batches, Iterable[Task]]],
        resume: bool,
    ) -> None:
        """Collective, before a checkpoint is loaded: read the file, or compute the margins and write it. asked: all
        tasks, the same on every rank; what makes pairs of them"""
        if resume and all(backend.exchange(self._path.exists())):
            self._margins = msgpack.unpackb(self._path.read_bytes(), strict_map_key=False)
            return
        for pairs, tasks in asked:
            for chunk in pairs.chunks(tasks):
                self._add(backend, experience, pairs, chunk)
        if backend.rank == 0:
            partial = self._path.with_suffix(".partial")
            with writing(partial):
                partial.write_bytes(msgpack.packb(self._margins))
            os.replace(partial, self._path)
        backend.exchange(None)

    def _add(self, backend: Backend, experience: Experience, pairs: Batches, chunk: Sequence[Task]) -> None:
        batch, _ = pairs.of(chunk)
        logp_N = experience.predict({"now": backend.policy.predict}, batch)["now"]
        mine = (
            {}
            if batch is None
            else dict(zip(_digests(batch), signed_sums(batch, logp_N).tolist(), strict=True))
        )
        for theirs in exchange_per_data_rank(backend, list(mine.items())):
            self._margins.update(theirs)


def _digests(batch: MicroBatch) -> list[bytes]:
    """A digest of each pair: its tokens, which of them are learned, and its pictures."""
    found, end = [], 0
    shown = [item.digest for item in batch.media]
    for length in batch.lengths_R:
        at = slice(end, end + length)
        digest = xxhash.xxh3_128()
        for part in (batch.token_ids_N[at], batch.position_ids_N[at], batch.loss_mask_N[at]):
            digest.update(part.numpy().tobytes())
        for item in dict.fromkeys(batch.media_N[at].tolist()):
            digest.update(shown[item] if item >= 0 else b"")
        found.append(digest.digest())
        end += length
    return found
