"""The ages of the groups that a claim may take, as the queue counts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.queue.ledger import generator_commands, learner_commands
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.protocol.settings import StreamSettings

SETTINGS = StreamSettings(
    groups_per_version=2, max_staleness=8, window=8, depth=64, max_bytes=1 << 20, lease_s=30.0
)


def commit(ledger: Ledger, version: int) -> None:
    """A group whose oldest token is of that version."""
    lease = rq.LeaseRequest(stream="train", held=version, lineage=0, most=1)
    (grant,) = generator_commands.lease(ledger, lease, "g/1", 0.0)
    request = rq.CommitRequest(
        stream="train",
        ordinal=grant.ordinal,
        epoch=grant.epoch,
        tokens=1,
        start_version=version,
        digest=1,
        nbytes=1,
    )
    generator_commands.commit(ledger, request)


def ages(ledger: Ledger) -> dict[str, float]:
    return {name: n for name, n in ledger.counts(0.0).items() if name.startswith("age/")}


def opened() -> Ledger:
    ledger = Ledger()
    ledger.open(SETTINGS, None)
    ledger.submit(0, 32)
    return ledger


def train(ledger: Ledger, step: int) -> None:
    epoch = ledger.state.learner_epoch
    index, last = 0, False
    while not last:
        request = rq.ClaimRequest(
            stream="train",
            learner_epoch=epoch,
            step=step,
            index=index,
            rank=0,
            max_tokens=1 << 20,
            whole=False,
        )
        claimed = learner_commands.claim(ledger, request)
        assert claimed is not None
        last, index = claimed.last, index + 1
    learner_commands.trained(ledger, rq.TrainedRequest(stream="train", learner_epoch=epoch, step=step))


def test_no_group_has_no_age():
    assert ages(opened()) == {}


@given(extra=st.lists(st.just(0), min_size=1, max_size=6))
def test_ages_grow_with_each_version_and_leave_with_the_groups(extra):
    ledger = opened()
    for _ in range(2 + len(extra)):
        commit(ledger, 0)
    assert ages(ledger) == {"age/oldest": 0, "age/mean": 0.0}
    train(ledger, 0)
    assert ages(ledger) == {"age/oldest": 1, "age/mean": 1.0}
    commit(ledger, 1)
    waiting = len(extra) + 1
    assert ages(ledger) == {"age/oldest": 1, "age/mean": pytest.approx(len(extra) / waiting)}
