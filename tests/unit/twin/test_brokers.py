"""The queue's thread in a simulated run, against figures computed by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.twin.brokers import Brokers, SentGroup
from asyncrl.twin.outcome import Setup, Simulated
from asyncrl.twin.simulate import simulate
from asyncrl.twin.times import GenerationTimes, LearnerTimes, Lengths, QueueTimes, StageTimes

FOUR = Setup(groups=4, group_size=2, slots=8, max_staleness=0)
CONSTANT = StageTimes(
    generation=GenerationTimes(step_s=0.01, sequence_s=0.0),
    lengths=Lengths(median=100.0),
    learner=LearnerTimes(token_s=1e-3, version_s=0.0),
)
"""A version of four groups with 200 tokens each is generated in 1 s, and computed in 0.8 s."""

PAYLOADS = QueueTimes(byte_s=1e-3, token_bytes=1.0)
"""A group's payload takes 0.1 s on its way in, and as long on its way out."""


def simulated(queue: QueueTimes, **changes: int) -> Simulated:
    return simulate(dataclasses.replace(FOUR, **changes), dataclasses.replace(CONSTANT, queue=queue))


@pytest.mark.parametrize(
    ("queue", "changes", "more_s"),
    [
        (QueueTimes(), {}, 0.0),
        # Four leases in one request, four commits that wait for each other, and a claim of four groups.
        (QueueTimes(group_s=0.3), {}, 3 * 4 * 0.1),
        (QueueTimes(request_s=0.05), {}, 0.0),  # the claim of the one rank is part of group_s
        (PAYLOADS, {}, 4 * 0.1 + 4 * 0.1),
        (PAYLOADS, {"payload_brokers": 2}, 2 * 0.1 + 2 * 0.1),
        (PAYLOADS, {"payload_brokers": 3}, 2 * 0.1 + 2 * 0.1),  # one of them has two groups
        (PAYLOADS, {"payload_brokers": 4}, 0.1 + 0.1),
        (QueueTimes(group_s=0.3), {"payload_brokers": 4}, 3 * 4 * 0.1),  # the ledger stays where it is
        # The generator and the rank leave the broker 0.8 of its time.
        (QueueTimes(group_s=0.3, generator_share=0.15, rank_share=0.05), {}, 3 * 4 * 0.1 / 0.8),
    ],
    ids=str,
)
def test_a_version_waits_for_the_broker(queue: QueueTimes, changes: dict[str, int], more_s: float) -> None:
    assert simulated(queue, **changes).version_s == pytest.approx(1.8 + more_s)


@pytest.mark.parametrize(
    ("payload_brokers", "requests"),
    # Three further ranks. A payload broker takes two groups, one after another, and then a request of each rank.
    [(0, 3), (2, 3 + 2 + 4)],
)
def test_ranks_and_payload_brokers_take_requests(payload_brokers: int, requests: int) -> None:
    fast, slow = (
        simulated(QueueTimes(request_s=request_s), data_ranks=4, payload_brokers=payload_brokers)
        for request_s in (0.0, 0.05)
    )
    assert slow.version_s - fast.version_s == pytest.approx(requests * 0.05)


def test_busy_shares_are_those_of_requests_and_of_connected_processes() -> None:
    alone = simulated(QueueTimes(group_s=0.3, generator_share=0.15, rank_share=0.05))
    assert alone.brokers == pytest.approx([4 * 0.3 / alone.version_s + 0.2])
    several = simulated(PAYLOADS, payload_brokers=2)
    assert several.brokers == pytest.approx([0.0, 0.4 / several.version_s, 0.4 / several.version_s])


@pytest.mark.parametrize("versions", [3, 30])
def test_busy_shares_are_the_same_for_any_number_of_versions(versions: int) -> None:
    """Groups are there when the last version ends: the claim that begins the next one does not count."""
    slow = LearnerTimes(token_s=2e-3, version_s=0.0)
    times = dataclasses.replace(CONSTANT, learner=slow, queue=QueueTimes(group_s=0.03))
    outcome = simulate(dataclasses.replace(FOUR, max_staleness=4), times, versions)
    assert outcome.brokers == pytest.approx([4 * 0.03 / outcome.version_s], rel=0.02)


def test_a_payload_waits_for_its_own_payload_broker_alone() -> None:
    brokers = Brokers(PAYLOADS, dataclasses.replace(FOUR, payload_brokers=2))
    assert brokers.store(0.0, SentGroup(0, 1000.0)) == pytest.approx(0.5)
    assert brokers.store(0.0, SentGroup(1, 10.0)) == pytest.approx(0.005)
    assert brokers.store(0.0, SentGroup(2, 10.0)) == pytest.approx(0.505)
    assert brokers.fetch(0.1, [SentGroup(3, 10.0)]) == pytest.approx(0.005)


@pytest.mark.parametrize(("brokers", "groups_per_s"), [(0, 5.0), (1, 5.0), (2, 10.0)])
def test_payloads_bound_a_run_that_overlaps(brokers: int, groups_per_s: float) -> None:
    """0.2 s of a payload broker for each group, where the pools would make 20 groups a second."""
    pools = dataclasses.replace(
        CONSTANT,
        generation=GenerationTimes(step_s=1e-3, sequence_s=0.0),
        learner=LearnerTimes(token_s=0.0, version_s=0.1),
        queue=PAYLOADS,
    )
    setup = dataclasses.replace(FOUR, max_staleness=4, slots=64, payload_brokers=brokers)
    outcome = simulate(setup, pools)
    assert 0.85 * groups_per_s < outcome.groups_per_s < 1.02 * groups_per_s
    assert max(outcome.brokers) == pytest.approx(outcome.groups_per_s / groups_per_s, rel=0.05)


def test_a_broker_without_time_for_requests_still_ends_a_run() -> None:
    outcome = simulated(QueueTimes(group_s=1e-3, generator_share=1.2))
    assert outcome.brokers[0] > 1.0
    assert outcome.version_s == pytest.approx(1.8 + 3 * 4 * 1e-3 / 3 / 1e-3)


@given(
    requests=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9), st.floats(0, 1000)), max_size=20),
    payload_brokers=st.integers(0, 4),
)
def test_nobody_works_faster_than_time_passes(
    requests: list[tuple[float, int, float]], payload_brokers: int
) -> None:
    brokers = Brokers(PAYLOADS, dataclasses.replace(FOUR, payload_brokers=payload_brokers))
    now, ends = 0.0, [0.0]
    for pause, ordinal, tokens in requests:
        now += pause
        group = SentGroup(ordinal, tokens)
        waits = [brokers.store(now, group), brokers.commit(now, group)]
        waits += [brokers.claim(now, [group]), brokers.fetch(now, [group])]
        assert min(waits) >= 0
        ends += [now + wait for wait in waits]
    assert sum(brokers.seconds) == pytest.approx(sum(tokens for *_, tokens in requests) * 1e-3)
    assert max(brokers.seconds) <= max(ends) + 1e-9
