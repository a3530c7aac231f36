"""The ledger on every interleaving of small runs: the staleness bound holds, each task ends once, no deadlock."""

from __future__ import annotations

import pytest

from asyncrl.queue.ledger import admission
from asyncrl.queue.protocol.settings import StreamSettings

from .explorer import Explorer, Scope

QUICK = [
    Scope(tasks=3, batch=1, staleness=0, window=1, faults=1),
    Scope(tasks=3, batch=1, staleness=1, window=1, faults=1),
    Scope(tasks=3, batch=2, staleness=1, window=2, faults=0, hedges=True),
]
SLOW = [
    Scope(tasks=4, batch=2, staleness=1, window=2, faults=1),
    Scope(tasks=3, batch=1, staleness=2, window=2, faults=1),
    Scope(tasks=2, batch=1, staleness=1, window=1, faults=2),
    Scope(tasks=2, batch=1, staleness=1, window=1, faults=1, hedges=True),
]


def name(scope: Scope) -> str:
    hedged = ", hedged" if scope.hedges else ""
    return f"{scope.tasks} tasks, B {scope.batch}, η {scope.staleness}, W {scope.window}, {scope.faults} faults{hedged}"


@pytest.mark.parametrize(
    "scope", [*QUICK, *(pytest.param(scope, marks=pytest.mark.slow) for scope in SLOW)], ids=name
)
def test_every_interleaving_keeps_the_bound_and_ends(scope: Scope) -> None:
    explorer = Explorer(scope)
    explorer.explore()
    assert explorer.ends
    assert len(explorer.seen) > 100
    print(f"{name(scope)}: {len(explorer.seen)} points, {explorer.moves} moves, {explorer.ends} ends")


def test_a_bound_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = StreamSettings.spare_versions.fget
    monkeypatch.setattr(StreamSettings, "spare_versions", property(lambda self: spare(self) + 1))
    with pytest.raises(AssertionError, match=r"after begin; worker \d holds 0; "):
        Explorer(QUICK[1]).explore()


def test_a_ledger_that_leases_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = admission.leasable
    monkeypatch.setattr(
        "asyncrl.queue.ledger.generator_commands.leasable", lambda state, held: plain(state, held - 1)
    )
    with pytest.raises(AssertionError, match="nobody can do anything, and 3 tasks have not ended"):
        Explorer(QUICK[0]).explore()
