"""A ledger whose commands take the fields of their requests as arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from asyncrl.queue.ledger import generator_commands, learner_commands
from asyncrl.queue.ledger.generator_commands import Grant
from asyncrl.queue.ledger.learner_commands import Claimed
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.protocol.settings import Frontier

Leases = Iterable[tuple[int, int]]


class DrivenLedger(Ledger):
    """The ledger of stream 't'."""

    def lease(self, worker: str, held: int, lineage: int, most: int, now: float) -> list[Grant]:
        request = rq.LeaseRequest(stream="t", held=held, lineage=lineage, most=most)
        return generator_commands.lease(self, request, worker, now)

    def progress(self, ordinal: int, epoch: int, nbytes: int) -> None:
        request = rq.ProgressRequest(stream="t", ordinal=ordinal, epoch=epoch, nbytes=nbytes)
        generator_commands.progress(self, request)

    def commit(
        self,
        ordinal: int,
        epoch: int,
        tokens: int,
        nbytes: int,
        start_version: int,
        digest: int,
        columns: Collection[str] = (),
        squares: int = 0,
    ) -> bool:
        request = rq.CommitRequest(
            stream="t",
            ordinal=ordinal,
            epoch=epoch,
            tokens=tokens,
            nbytes=nbytes,
            start_version=start_version,
            digest=digest,
            columns=tuple(columns),
            squares=squares,
        )
        return generator_commands.commit(self, request)

    def drop(self, ordinal: int, epoch: int, reason: str) -> None:
        request = rq.DropRequest(stream="t", ordinal=ordinal, epoch=epoch, reason=reason)
        generator_commands.drop(self, request)

    def stage_lease(self, stage: str, worker: str, most: int, now: float) -> list[Grant]:
        request = rq.StageLeaseRequest(stream="t", stage=stage, most=most)
        return generator_commands.stage_lease(self, request, worker, now)

    def stage_commit(
        self, stage: str, ordinal: int, epoch: int, nbytes: int, version: int, digest: int
    ) -> bool:
        request = rq.StageCommitRequest(
            stream="t",
            stage=stage,
            ordinal=ordinal,
            epoch=epoch,
            nbytes=nbytes,
            version=version,
            digest=digest,
        )
        return generator_commands.stage_commit(self, request)

    def stage_drop(self, stage: str, ordinal: int, epoch: int, reason: str) -> None:
        request = rq.StageDropRequest(stream="t", stage=stage, ordinal=ordinal, epoch=epoch, reason=reason)
        generator_commands.drop(self, request)

    def renew(self, leases: Leases, now: float) -> list[tuple[int, int]]:
        return generator_commands.renew(self, leases, now)

    def expire(self, now: float) -> list[int]:
        return generator_commands.expire(self, now)

    def give_back(self, leases: Leases) -> None:
        generator_commands.give_back(self, leases)

    def leases_of(self, worker: str) -> list[tuple[int, int]]:
        return self.state.leases.of(worker)

    def claim(
        self,
        learner_epoch: int,
        step: int,
        index: int,
        rank: int,
        max_tokens: int,
        whole: bool,
        attempt: int | None = None,
    ) -> Claimed | None:
        request = rq.ClaimRequest(
            stream="t",
            learner_epoch=learner_epoch,
            step=step,
            index=index,
            rank=rank,
            max_tokens=max_tokens,
            whole=whole,
            attempt=attempt,
        )
        return learner_commands.claim(self, request)

    def trained(self, learner_epoch: int, step: int, waited: float | None = None) -> int:
        request = rq.TrainedRequest(stream="t", learner_epoch=learner_epoch, step=step, waited=waited)
        return learner_commands.trained(self, request)

    def reject(self, learner_epoch: int, step: int, reason: str) -> int:
        request = rq.RejectRequest(stream="t", learner_epoch=learner_epoch, step=step, reason=reason)
        return learner_commands.reject(self, request)

    def abandon(
        self, learner_epoch: int, step: int, attempt: int, dropped: Collection[int], reason: str
    ) -> int:
        request = rq.AbandonRequest(
            stream="t",
            learner_epoch=learner_epoch,
            step=step,
            attempt=attempt,
            dropped=tuple(dropped),
            reason=reason,
        )
        return learner_commands.abandon(self, request)

    def checkpointed(self, learner_epoch: int, version: int) -> None:
        request = rq.CheckpointedRequest(stream="t", learner_epoch=learner_epoch, version=version)
        learner_commands.checkpointed(self, request)

    def collect(
        self, learner_epoch: int, got: Collection[int] = (), corrupt: Collection[int] = ()
    ) -> tuple[int, ...]:
        request = rq.CollectRequest(
            stream="t", learner_epoch=learner_epoch, got=tuple(got), corrupt=tuple(corrupt)
        )
        return learner_commands.collect(self, request)

    def frontier(self, learner_epoch: int) -> Frontier:
        return learner_commands.snapshot(self, rq.SnapshotRequest(stream="t", learner_epoch=learner_epoch))


def ordinals(grants: list[Grant]) -> list[int]:
    return [grant.ordinal for grant in grants]
