"""A ledger whose commands take the fields of their requests as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.queue.ledger import generator_commands, learner_commands
from asyncrl.queue.ledger.generator_commands import Grant
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.queue.protocol import requests as rq


def _command(command: Callable[..., Any], kind: type[rq.Request], *names: str) -> Callable[..., Any]:
    """A method that makes a request of these fields, in this order or by name; a list is made a tuple."""

    def method(ledger: Ledger, *values: Any, **more: Any) -> Any:
        assert len(values) <= len(names), f"{kind.__name__} takes {names}"
        fields = dict(zip(names, values, strict=False)) | more
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        return command(ledger, kind(stream="t", **fields))

    return method


class DrivenLedger(Ledger):
    """The ledger of stream 't'."""

    def lease(self, worker: str, held: int, lineage: int, most: int, now: float) -> list[Grant]:
        request = rq.LeaseRequest(stream="t", held=held, lineage=lineage, most=most)
        return generator_commands.lease(self, request, worker, now)

    progress = _command(generator_commands.progress, rq.ProgressRequest, "ordinal", "epoch", "nbytes")
    commit = _command(
        generator_commands.commit,
        rq.CommitRequest,
        *("ordinal", "epoch", "tokens", "nbytes", "start_version", "digest", "columns", "squares"),
    )
    drop = _command(generator_commands.drop, rq.DropRequest, "ordinal", "epoch", "reason")
    renew = generator_commands.renew
    expire = generator_commands.expire
    give_back = generator_commands.give_back

    def leases_of(self, worker: str) -> list[tuple[int, int]]:
        return self.state.leases.of(worker)

    def stage_lease(self, stage: str, worker: str, most: int, now: float) -> list[Grant]:
        request = rq.StageLeaseRequest(stream="t", stage=stage, most=most)
        return generator_commands.stage_lease(self, request, worker, now)

    stage_commit = _command(
        generator_commands.stage_commit,
        rq.StageCommitRequest,
        *("stage", "ordinal", "epoch", "nbytes", "version", "digest"),
    )
    stage_drop = _command(generator_commands.drop, rq.StageDropRequest, "stage", "ordinal", "epoch", "reason")

    claim = _command(
        learner_commands.claim,
        rq.ClaimRequest,
        *("learner_epoch", "step", "index", "rank", "max_tokens", "whole", "attempt"),
    )
    trained = _command(learner_commands.trained, rq.TrainedRequest, "learner_epoch", "step", "waited")
    reject = _command(learner_commands.reject, rq.RejectRequest, "learner_epoch", "step", "reason")
    abandon = _command(
        learner_commands.abandon,
        rq.AbandonRequest,
        *("learner_epoch", "step", "attempt", "dropped", "reason"),
    )
    checkpointed = _command(learner_commands.checkpointed, rq.CheckpointedRequest, "learner_epoch", "version")
    collect = _command(learner_commands.collect, rq.CollectRequest, "learner_epoch", "got", "corrupt")
    frontier = _command(learner_commands.snapshot, rq.SnapshotRequest, "learner_epoch")


def ordinals(grants: list[Grant]) -> list[int]:
    return [grant.ordinal for grant in grants]
