"""Advantages of steps on small trees of states, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from advantage_cases import tokens_batch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.algorithms.advantages.step_advantages import BatchSteps
from asyncrl.learner.data.batch import MicroBatch

UNIT = 0.5**0.5  # what the better of two values is worth: half their distance over their unbiased deviation


def walk(*rollouts: tuple[str, float], groups: list[int] | None = None) -> MicroBatch:
    """Rollouts of one token per step: the states they came through, by letter, and R."""
    states = [path for path, _ in rollouts]
    return tokens_batch(
        ["0" + "1" * len(path) for path in states],
        [reward for _, reward in rollouts],
        groups=groups,
        step=[[-1, *range(len(path))] for path in states],
        anchor=[[0, *map(ord, path)] for path in states],
    )


def by_rollout(batch: MicroBatch, **keys: float) -> list[list[float]]:
    """Advantages of the policy's tokens, a list per rollout."""
    ours_N = advantages(batch, AlgorithmConfig(**keys))
    return [each.tolist()[1:] for each in ours_N.split(batch.lengths_R)]


def test_steps_earn_discounted_returns_and_meet_in_their_states() -> None:
    steps = BatchSteps.of(walk(("ab", 4.0), ("ba", 2.0)), gamma=0.5)
    assert steps.returns_S.tolist() == [2, 4, 1, 2]
    assert steps.state_S.tolist() == [0, 1, 1, 0]


def test_states_of_other_tasks_never_meet() -> None:
    steps = BatchSteps.of(walk(("a", 4.0), ("a", 2.0), groups=[0, 1]), gamma=1.0)
    assert steps.state_S.tolist() == [0, 1]


def test_step_rewards_count_for_their_step() -> None:
    batch = tokens_batch(
        ["01111"],
        [5.0],
        step=[[-1, 0, 0, 1, 1]],
        anchor=[[0, 7, 7, 8, 8]],
        step_rewards=[[0.0, 0.0, 1.0, 0.0, 3.0]],  # and 1 more, the rest of R
    )
    assert BatchSteps.of(batch, gamma=0.5).returns_S.tolist() == [1 + 0.5 * 4, 4]


def test_tokens_outside_every_step_go_with_the_step_before() -> None:
    batch = tokens_batch(
        ["0111101"], [6.0], step=[[-1, -1, 0, -1, 1, -1, -1]], anchor=[[0, 0, 7, 0, 8, 0, 0]]
    )
    steps = BatchSteps.of(batch, gamma=0.5)
    assert steps.step_P.tolist() == [0, 1, 1, 2, 2]
    assert steps.returns_S.tolist() == [1.5, 3, 6]
    assert steps.state_S.tolist() == [0, 1, 2]


def test_contexts_reach_back_state_by_state() -> None:
    steps = BatchSteps.of(walk(("abc", 0.0), ("dbc", 0.0)), gamma=1.0)
    assert steps.state_S.tolist() == [0, 1, 2, 3, 1, 2]
    one_S = steps.one_state_more(steps.state_S)
    assert one_S.tolist() == [1, 2, 3, 0, 4, 3]
    assert steps.one_state_more(one_S).tolist() == [1, 3, 4, 0, 2, 5]


def test_steps_are_numbered_through_all_rollouts() -> None:
    batch = tokens_batch(
        ["01111", "0111"],
        [0.0, 0.0],
        step=[[-1, -1, 0, -1, 1], [-1, 0, 0, -1]],
        anchor=[[0, 0, 7, 0, 8], [0, 7, 7, 0]],
    )
    assert BatchSteps.of(batch, gamma=1.0).step_P.tolist() == [0, 1, 1, 2, 3, 3, 3]


def test_gigpo_adds_the_step_to_the_episode() -> None:
    # Episodes: ±UNIT. Both begin in a (returns 1 and 0); b and c are alone. ω = ½
    ours = by_rollout(walk(("ab", 1.0), ("ac", 0.0)), advantage="gigpo", step_weight=0.5)
    assert ours[0] == pytest.approx([1.5 * UNIT, UNIT], abs=1e-5)
    assert ours[1] == pytest.approx([-1.5 * UNIT, -UNIT], abs=1e-5)


def test_gigpo_compares_a_state_with_a_later_visit_of_the_same_rollout() -> None:
    # γ = ½: a has returns ½ and 1 in the first rollout, 0 and 0 in the second; mean 3/8
    ours = by_rollout(walk(("aa", 1.0), ("aa", 0.0)), advantage="gigpo", gamma=0.5)
    values = torch.tensor([0.5, 1.0, 0.0, 0.0])
    steps = ((values - values.mean()) / values.std()).tolist()
    assert ours[0] == pytest.approx([UNIT + steps[0], UNIT + steps[1]], abs=1e-5)
    assert ours[1] == pytest.approx([-UNIT + steps[2], -UNIT + steps[3]], abs=1e-5)


def test_hgpo_weighs_deeper_histories_more() -> None:
    # c is reached by three rollouts, twice through b. Level 0: returns 3 0 0; level 1: 3 0 through b, the third alone.
    batch = walk(("bc", 3.0), ("bc", 0.0), ("ac", 0.0))
    level_0 = [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5]
    level_1 = [UNIT, -UNIT]
    ours = by_rollout(batch, advantage="hgpo", hgpo_history=1)
    assert [each[1] for each in ours] == pytest.approx(
        [(level_0[0] + 2 * level_1[0]) / 3, (level_0[1] + 2 * level_1[1]) / 3, level_0[2]], abs=1e-5
    )
    # The first step in b has no history: level 0 alone, returns 3 and 0. The step in a is alone at every level.
    assert [each[0] for each in ours] == pytest.approx([UNIT, -UNIT, 0], abs=1e-5)


def test_hgpo_without_history_is_the_step_term_of_gigpo() -> None:
    batch = walk(("aba", 1.0), ("abb", 0.0), ("bba", 3.0))
    steps = by_rollout(batch, advantage="hgpo", hgpo_history=0, gamma=0.9)
    both = by_rollout(batch, advantage="gigpo", gamma=0.9)
    episode = by_rollout(batch, advantage="grpo")
    for step, total, base in zip(steps, both, episode, strict=True):
        assert total == pytest.approx([s + b for s, b in zip(step, base, strict=True)], abs=1e-5)


def test_hgpo_gives_equal_weights_at_alpha_0() -> None:
    batch = walk(("bc", 3.0), ("bc", 0.0), ("ac", 0.0))
    ours = by_rollout(batch, advantage="hgpo", hgpo_history=1, hgpo_alpha=0.0)
    assert ours[0][1] == pytest.approx((2 / 3**0.5 + UNIT) / 2, abs=1e-5)


def test_a_history_needs_all_of_its_steps() -> None:
    # Level 2 of the last c exists only where two steps come before it: for nobody here.
    shallow = by_rollout(walk(("bc", 3.0), ("bc", 0.0)), advantage="hgpo", hgpo_history=1)
    deep = by_rollout(walk(("bc", 3.0), ("bc", 0.0)), advantage="hgpo", hgpo_history=5)
    assert shallow == deep


def moved(batch: MicroBatch, *weights: list[float]) -> MicroBatch:
    """The rollouts with π/μ of each step."""
    behaviour_N = torch.full((batch.tokens,), -2.0)
    logs = torch.tensor([log for rollout in weights for log in (0.0, *map(math.log, rollout))])
    columns = {**batch.columns, "proximal": behaviour_N + logs}
    return dataclasses.replace(batch, behaviour_N=behaviour_N, columns=columns)


def test_the_off_policy_step_baseline_by_hand() -> None:
    # γ = ½, so the returns are 2 4 and 1 2. a: w = ½ · 3 → 1, and 4 → 1; V = (2 + 2) / 2. b: w = 3 → 1, ½ · 4 → 1.
    apart = moved(walk(("ab", 4.0), ("ba", 2.0)), [0.5, 3.0], [0.5, 4.0])
    ours = by_rollout(apart, advantage="off_policy_step_baseline", gamma=0.5)
    assert ours[0] == pytest.approx([0, 1.5], abs=1e-5)
    assert ours[1] == pytest.approx([-1.5, 0], abs=1e-5)
    # a: w = 3 · ¼ = ¾ and ½; V = (¾ · 2 + ½ · 2) / 2 = 1¼. b: w = ¼ and ½ · 1; V = (¼ · 4 + ½ · 1) / 2 = ¾
    closer = moved(walk(("ab", 4.0), ("ba", 2.0)), [3.0, 0.25], [1.0, 0.5])
    ours = by_rollout(closer, advantage="off_policy_step_baseline", gamma=0.5)
    assert ours[0] == pytest.approx([0.75, 3.25], abs=1e-5)
    assert ours[1] == pytest.approx([0.25, 0.75], abs=1e-5)


def test_a_step_alone_in_its_state_is_set_against_whole_rollouts() -> None:
    ways = moved(walk(("ab", 4.0), ("ac", 1.0)), [1.0, 0.5], [1.0, 0.95])
    # a has returns 2 and ½: V = (½ · 2 + 0.95 · ½) / 2. b and c: V = (½ · 4 + 0.95 · 1) / 2
    ours = by_rollout(ways, advantage="off_policy_step_baseline", gamma=0.5)
    assert ours[0] == pytest.approx([2 - 0.7375, 4 - 1.475], abs=1e-5)
    assert ours[1] == pytest.approx([0.5 - 0.7375, 1 - 1.475], abs=1e-5)
    # F = −1: a: V = −1 + (½ · 3 + 0.95 · 1½) / 2. b and c: V = −1 + (½ · 5 + 0.95 · 2) / 2
    ours = by_rollout(ways, advantage="off_policy_step_baseline", gamma=0.5, baseline_floor=-1.0)
    assert ours[0] == pytest.approx([2 - 0.4625, 4 - 1.2], abs=1e-5)
    assert ours[1] == pytest.approx([0.5 - 0.4625, 1 - 1.2], abs=1e-5)


def test_a_rollout_that_stays_in_a_state_of_its_own_is_set_against_the_others() -> None:
    stays = moved(walk(("bxx", 1.0), ("bcd", 5.0)), [1.0] * 3, [1.0] * 3)
    ours = by_rollout(stays, advantage="off_policy_step_baseline", gamma=0.5)
    assert ours[0] == pytest.approx([-0.5, -2, -2], abs=1e-5)
    assert ours[1] == pytest.approx([0.5, 2, 2], abs=1e-5)


@pytest.mark.parametrize("advantage", ["off_policy_step_baseline", "gigpo"])
def test_rounding_of_rewards_makes_no_difference_between_equal_futures(advantage: str) -> None:
    """Three ways to the state m, from which each earns 10.9. Sums of float32 differ in their last digits."""
    rewards = [[-0.1, -0.1, 10.9], [0.9, -0.1, 10.9], [-0.1, -0.2, 10.9]]
    batch = tokens_batch(
        ["0111"] * 3,
        [float(torch.tensor(earned).sum()) for earned in rewards],
        step=[[-1, 0, 1, 2]] * 3,
        anchor=[[0, 1, 2, 9], [0, 3, 4, 9], [0, 5, 6, 9]],
        step_rewards=[[0.0, *earned] for earned in rewards],
    )
    ours = by_rollout(moved(batch, *[[1.0, 1.0, 0.95]] * 3), advantage=advantage)
    episode = by_rollout(batch, advantage="grpo")
    expected = [0.0] * 3 if advantage == "off_policy_step_baseline" else [each[2] for each in episode]
    assert [each[2] for each in ours] == expected


def test_a_state_of_equal_returns_counts_once_the_policy_leaves_it() -> None:
    def ahead(weight: float) -> list[float]:
        """Of the first step of each rollout."""
        ways = moved(walk(("a", 2.0), ("a", 2.0), ("b", 0.0)), [weight], [weight], [1.0])
        return [first for first, *_ in by_rollout(ways, advantage="off_policy_step_baseline")]

    assert ahead(0.95)[:2] == [0, 0]
    assert ahead(0.75)[:2] == pytest.approx([0.5, 0.5])


@given(
    rewards=st.lists(st.floats(-3, 3), min_size=2, max_size=4),
    paths=st.lists(st.text("abc", min_size=1, max_size=4), min_size=4, max_size=4),
    floor=st.floats(-3, 3),
)
def test_the_off_policy_step_baseline_of_fresh_data_is_a_mean(
    rewards: list[float], paths: list[str], floor: float
) -> None:
    batch = walk(*zip(paths, rewards, strict=False))
    fresh = moved(batch, *([1.0] * len(path) for path in paths[: len(rewards)]))
    ours = by_rollout(fresh, advantage="off_policy_step_baseline", baseline_floor=floor, gamma=0.9)
    steps = BatchSteps.of(batch, 0.9)
    expected = []
    for return_, state, rollout in zip(steps.returns_S, steps.state_S, steps.rollout_S, strict=True):
        same = steps.returns_S[steps.state_S == state]
        alone = bool((steps.rollout_S[steps.state_S == state] == rollout).all())
        ahead = batch.rewards_R[rollout] - batch.rewards_R.mean() if alone else return_ - same.mean()
        expected.append(float(ahead))
    assert [ahead for rollout in ours for ahead in rollout] == pytest.approx(expected, abs=2e-5)


def test_the_off_policy_step_baseline_needs_the_policy_of_the_versions_start() -> None:
    with pytest.raises(TrainingError, match="proximal"):
        by_rollout(walk(("a", 1.0), ("a", 0.0)), advantage="off_policy_step_baseline")


@pytest.mark.parametrize("literal", ["gigpo", "hgpo", "off_policy_step_baseline"])
def test_groups_without_steps_are_refused(literal: str) -> None:
    with pytest.raises(
        TrainingError, match="lack the column 'step': the algorithm needs steps from the reward"
    ):
        advantages(tokens_batch(["01", "01"], [1.0, 0.0]), AlgorithmConfig(advantage=literal))
