"""A simulated run against figures computed by hand, and against what must hold for any stage times."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.twin.outcome import Setup, Simulated
from asyncrl.twin.simulate import simulate
from asyncrl.twin.times import GenerationTimes, LearnerTimes, Lengths, StageTimes, SyncTimes
from asyncrl.twin.training import busiest

FOUR = Setup(groups=4, group_size=2, slots=8)
CONSTANT = StageTimes(
    generation=GenerationTimes(step_s=0.01, sequence_s=0.0),
    lengths=Lengths(median=100.0),
    learner=LearnerTimes(token_s=1e-3, version_s=0.0),
)
"""A version is generated in 100 steps, 1 s, and computed in 800 tokens, 0.8 s."""


def version_s(times: StageTimes = CONSTANT, **changes: object) -> float:
    return simulate(dataclasses.replace(FOUR, **changes), times).version_s  # type: ignore[arg-type]


def with_(times: StageTimes = CONSTANT, **sections: object) -> StageTimes:
    return dataclasses.replace(times, **sections)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- constant times, by hand


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"max_staleness": 0}, 1.8),
        ({"max_staleness": 0, "colocated": True}, 1.8),
        ({"max_staleness": 1}, 1.0),
        ({"max_staleness": 4}, 1.0),
        ({"max_staleness": 0, "generators": 2}, 1.8),  # one lease takes all that the slots of the first hold
        ({"max_staleness": 1, "data_ranks": 4}, 1.0),
        ({"max_staleness": 0, "data_ranks": 4}, 1.2),
        ({"max_staleness": 0, "slots": 2}, 4.8),  # the groups are decoded one after another
    ],
    ids=str,
)
def test_a_version_takes_what_a_sheet_of_paper_says(changes: dict[str, object], seconds: float) -> None:
    assert version_s(**changes) == pytest.approx(seconds)


def test_sequences_slow_each_other_down() -> None:
    slower = with_(generation=GenerationTimes(step_s=0.01, sequence_s=0.005))
    assert version_s(slower, max_staleness=0) == pytest.approx(100 * (0.01 + 8 * 0.005) + 0.8)


@pytest.mark.parametrize(
    ("slots", "prefills"),
    [(8, 0.05 + 8 * 0.002), (2, 4 * (0.05 + 2 * 0.002))],
    ids=["all join at once", "one group after another"],
)
def test_a_prefill_stops_the_decoding_and_makes_first_tokens(slots: int, prefills: float) -> None:
    times = with_(
        generation=GenerationTimes(step_s=0.01, sequence_s=0.0, prefill_s=0.05, prefill_sequence_s=0.002)
    )
    outcome = simulate(dataclasses.replace(FOUR, max_staleness=0, slots=slots), times)
    decoded = 99 * 0.01 * 8 / slots
    assert outcome.version_s == pytest.approx(decoded + prefills + 0.8)
    assert outcome.generators["compute"] == pytest.approx((decoded + prefills) * outcome.versions)


def test_rewards_publications_and_claims_add_up_where_the_pools_take_turns() -> None:
    times = with_(
        generation=GenerationTimes(step_s=0.01, sequence_s=0.0, reward_s=0.3),
        learner=LearnerTimes(
            token_s=1e-3, claim_s=0.05, version_s=0.2, publish_s=0.1, report_s=0.03, first_claim_s=0.07
        ),
        sync=SyncTimes(fetch_s=0.4, flip_s=0.5, queue_s=0.01),
    )
    # A lease and a commit take a request each, and so does the one claim.
    expected = 1.0 + 0.3 + 0.07 + (0.8 + 0.05 + 0.2) + 0.1 + 0.03 + 0.4 + 0.5 + 3 * 0.01
    outcome = simulate(dataclasses.replace(FOUR, max_staleness=0), times)
    assert outcome.version_s == pytest.approx(expected)
    assert outcome.shares("learner")["wait/queue"] == pytest.approx(0.03 / expected)


def test_only_the_flip_stops_a_generator_that_overlaps() -> None:
    """The fetch lies beside the decoding."""
    times = with_(sync=SyncTimes(fetch_s=0.3, flip_s=0.25))
    outcome = simulate(dataclasses.replace(FOUR, max_staleness=4), times)
    assert outcome.version_s == pytest.approx(1.25)
    assert outcome.shares("generators")["wait/weights"] == pytest.approx(0.25 / 1.25)
    assert outcome.lag_s == pytest.approx(0.55)


def test_switching_counts_for_colocated_pools_alone() -> None:
    times = with_(sync=SyncTimes(fetch_s=0.1, switch_s=2.0))
    assert version_s(times, max_staleness=0, colocated=True) == pytest.approx(3.8)
    assert version_s(times, max_staleness=0) == pytest.approx(1.9)


def test_a_whole_batch_is_computed_once_its_last_group_is_in() -> None:
    """Claims of one group each would otherwise be computed beside the decoding of the rest."""
    times = with_(lengths=Lengths(quantiles=[50.0, 150.0]))
    few = {"max_staleness": 2, "slots": 2, "claim_tokens": 200}
    whole = simulate(dataclasses.replace(FOUR, whole_batch=True, **few), times)  # type: ignore[arg-type]
    streamed = simulate(dataclasses.replace(FOUR, **few), times)  # type: ignore[arg-type]
    assert whole.mean_staleness >= streamed.mean_staleness
    assert whole.version_s >= streamed.version_s * 0.99


def test_shares_add_up_and_name_the_waits() -> None:
    outcome = simulate(dataclasses.replace(FOUR, max_staleness=0), CONSTANT)
    assert outcome.shares("generators") == pytest.approx(
        {"compute": 1 / 1.8, "wait/weights": 0.0, "wait/tasks": 0.8 / 1.8}
    )
    assert outcome.shares("learner") == pytest.approx(
        {"compute": 0.8 / 1.8, "wait/groups": 1 / 1.8, "wait/publish": 0.0, "wait/queue": 0.0}
    )
    assert outcome.groups_per_s == pytest.approx(4 / 1.8)
    assert outcome.tokens_per_s == pytest.approx(800 / 1.8)
    assert outcome.bound == pytest.approx(4 / 1.8)


def test_the_first_versions_can_count_too() -> None:
    """From the start on, one step is generated before the learner has any work."""
    outcome = simulate(dataclasses.replace(FOUR, max_staleness=1), CONSTANT, versions=4, warm_up=0)
    assert outcome.seconds == pytest.approx(1.0 + 3 * 1.0 + 0.8)
    assert outcome.staleness == {0: 4, 1: 12}


@pytest.mark.parametrize(
    ("tokens", "ranks", "most"),
    [([5, 3, 1, 9], 2, 9), ([4, 4], 8, 4), ([3, 3, 2, 2, 2], 2, 7), ([1, 2], 1, 3)],
)
def test_the_busiest_rank(tokens: list[int], ranks: int, most: int) -> None:
    assert busiest(tokens, ranks) == most


def test_setups_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="max_staleness must be 0"):
        Setup(groups=1, group_size=1, max_staleness=1, colocated=True)
    with pytest.raises(ValueError, match="generators = 0"):
        Setup(groups=1, group_size=1, generators=0)


# ---------------------------------------------------------------------- any stage times

small = st.floats(0.0, 2.0)
any_times = st.builds(
    StageTimes,
    generation=st.builds(
        GenerationTimes,
        step_s=st.floats(1e-3, 0.1),
        sequence_s=st.floats(0, 0.02),
        prefill_s=st.just(0.0) | st.floats(1e-3, 0.2),
        prefill_sequence_s=st.just(0.0) | st.floats(1e-4, 0.02),
        reward_s=small,
    ),
    lengths=st.builds(Lengths, median=st.floats(1, 200), sigma=st.floats(0, 1), most=st.just(400.0)),
    learner=st.builds(
        LearnerTimes, token_s=st.floats(0, 5e-3), claim_s=st.floats(0, 0.1), version_s=small, publish_s=small
    ),
    sync=st.builds(SyncTimes, fetch_s=small, flip_s=small, switch_s=small, queue_s=st.floats(0, 0.1)),
)
any_setups = st.builds(
    Setup,
    groups=st.integers(1, 8),
    group_size=st.integers(1, 4),
    generators=st.integers(1, 5),
    slots=st.integers(4, 32),
    data_ranks=st.integers(1, 4),
    max_staleness=st.integers(0, 5),
    claim_tokens=st.none() | st.integers(1, 2000),
    whole_batch=st.booleans(),
)
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def simulated(setup: Setup, times: StageTimes, **more: object) -> Simulated:
    return simulate(setup, times, versions=8, **more)  # type: ignore[arg-type]


@some
@given(any_setups, any_times)
def test_staleness_never_exceeds_the_bound(setup: Setup, times: StageTimes) -> None:
    outcome = simulated(setup, times, warm_up=0)
    assert max(outcome.staleness) <= setup.max_staleness
    assert sum(outcome.staleness.values()) == 8 * setup.groups


@some
@given(any_setups, any_times)
def test_shares_are_shares(setup: Setup, times: StageTimes) -> None:
    outcome = simulated(setup, times)
    for pool in ("generators", "learner"):
        assert -1e-9 <= outcome.busy(pool) <= 1 + 1e-9
        assert all(-1e-9 <= share <= 1 + 1e-9 for share in outcome.shares(pool).values())
        assert sum(getattr(outcome, pool).values()) == pytest.approx(outcome.seconds)


@some
@given(any_setups, any_times)
def test_no_run_is_faster_than_its_stage_times_allow(setup: Setup, times: StageTimes) -> None:
    outcome = simulated(setup, times, warm_up=0)
    assert outcome.groups_per_s <= outcome.bound * (1 + 1e-6)


@some
@given(any_setups, any_times, st.integers(0, 3))
def test_a_seed_decides_everything(setup: Setup, times: StageTimes, seed: int) -> None:
    assert simulated(setup, times, seed=seed) == simulated(setup, times, seed=seed)


@some
@given(st.integers(2, 8), st.integers(1, 4))
def test_generators_beyond_the_learner_change_nothing(groups: int, more: int) -> None:
    """The learner computes without a wait already."""
    learner = LearnerTimes(token_s=1e-2, version_s=0.0)
    setup = Setup(groups=groups, group_size=2, generators=2, slots=2 * groups, max_staleness=2)
    times = with_(learner=learner)
    before, after = (
        simulate(dataclasses.replace(setup, generators=count), times).groups_per_s for count in (2, 2 + more)
    )
    assert before == pytest.approx(after, rel=0.02)
    assert before == pytest.approx(1 / 2.0, rel=0.02)  # 200 tokens a group


@some
@given(st.integers(1, 3), st.integers(1, 3))
def test_ranks_beyond_the_generators_change_nothing(ranks: int, more: int) -> None:
    times = with_(learner=LearnerTimes(token_s=1e-5, version_s=0.0))
    setup = dataclasses.replace(FOUR, max_staleness=1)
    before, after = (
        simulate(dataclasses.replace(setup, data_ranks=count), times).groups_per_s
        for count in (ranks, ranks + more)
    )
    assert before == pytest.approx(after, rel=0.02)


@pytest.mark.parametrize(
    ("prefill_s", "sigma", "max_staleness"), [(0.0, 0.7, 2), (0.02, 0.7, 2), (0.3, 0.7, 2), (0.3, 0.0, 0)]
)
def test_rounded_ends_of_sequences_change_throughput_little(
    prefill_s: float, sigma: float, max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = with_(
        generation=GenerationTimes(step_s=0.01, sequence_s=0.001, prefill_s=prefill_s),
        lengths=Lengths(median=300.0, sigma=sigma, most=2000.0),
    )
    setup = Setup(groups=16, group_size=4, generators=4, slots=16, max_staleness=max_staleness)
    exact = simulate(setup, times)
    monkeypatch.setattr("asyncrl.twin.simulate.ROLLOUTS", 0)
    assert simulate(setup, times).groups_per_s == pytest.approx(exact.groups_per_s, rel=0.02)


def test_a_thousand_generators_are_simulated() -> None:
    """In steps of versions that are few here, to be quick."""
    setup = Setup(groups=1000, group_size=2, generators=1000, slots=4, max_staleness=2, data_ranks=100)
    outcome = simulate(setup, CONSTANT, versions=3, warm_up=1)
    assert sum(outcome.staleness.values()) == 3000
