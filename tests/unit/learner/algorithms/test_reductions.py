"""Sums, recursions and whitening over flat tokens, by hand and against plain loops."""

from __future__ import annotations

import pytest
import torch
from advantage_cases import on_ranks, random_batch, tokens_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learner.algorithms.reductions import (
    above_least,
    at_last_token,
    centred,
    has_spread,
    leave_one_out,
    of_next_token,
    returns_to_go,
    rollout_means,
    standardised,
    token_rewards,
    whiten,
)
from asyncrl.learner.algorithms.registry import Gather, alone

HOLES = ["011001", "0110", "00"]  # the last rollout has no token of the policy


def test_a_reward_goes_to_the_last_policy_token() -> None:
    batch = tokens_batch(HOLES, [2.0, 3.0, 5.0])
    assert at_last_token(batch.rewards_R, batch).tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 3, 0, 0, 0]


def test_step_rewards_stay_where_they_are_and_the_rest_comes_last() -> None:
    steps = [[9.0, 0.5, 0.0, 9.0, 9.0, 0.0], [0.0, 0.0, 0.25, 0.0], [0.0, 0.0]]  # 9: outside the mask
    batch = tokens_batch(HOLES, [2.0, 3.0, 5.0], step_rewards=steps)
    assert token_rewards(batch).tolist() == [0, 0.5, 0, 0, 0, 1.5, 0, 0, 3.0, 0, 0, 0]


def test_returns_skip_masked_tokens() -> None:
    batch = tokens_batch(["11001"], [2.0])
    assert returns_to_go(token_rewards(batch), 0.5, batch).tolist() == [0.5, 1, 0, 0, 2]


def test_the_next_value_is_that_of_the_next_policy_token() -> None:
    batch = tokens_batch(HOLES, [0.0] * 3)
    values_N = torch.arange(12.0)
    assert of_next_token(values_N, batch).tolist() == [0, 2, 5, 0, 0, 0, 0, 8, 0, 0, 0, 0]


def test_means_of_rollouts_do_not_see_masked_tokens() -> None:
    batch = tokens_batch(HOLES, [0.0] * 3)
    values_N = torch.where(batch.loss_mask_N, torch.arange(12.0), torch.nan)
    assert rollout_means(values_N, batch).tolist() == pytest.approx([(1 + 2 + 5) / 3, 7.5, 0.0])


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.floats(0, 1))
def test_returns_are_those_of_a_plain_loop(seed: int, decay: float) -> None:
    batch = random_batch(seed)
    rewards_N = batch.columns["values"].double()
    expected_N = torch.zeros(batch.tokens, dtype=torch.float64)
    running, rollout = 0.0, -1
    for n in reversed(range(batch.tokens)):
        if int(batch.seq_N[n]) != rollout:
            running, rollout = 0.0, int(batch.seq_N[n])
        if batch.loss_mask_N[n]:
            running = float(rewards_N[n]) + decay * running
            expected_N[n] = running
    torch.testing.assert_close(returns_to_go(rewards_N, decay, batch), expected_N)


def test_groups_need_not_be_adjacent() -> None:
    values_K, ids_K = torch.tensor([1.0, 10.0, 3.0, 20.0, 7.0]), torch.tensor([0, 1, 0, 1, 2])
    assert centred(values_K, ids_K).tolist() == [-1, -5, 1, 5, 0]
    assert leave_one_out(values_K, ids_K).tolist() == [-2, -10, 2, 10, 0]
    torch.testing.assert_close(
        standardised(values_K, ids_K).float(), torch.tensor([-0.70711, -0.70711, 0.70711, 0.70711, 0.0])
    )


@settings(deadline=None, max_examples=50)
@given(st.floats(-1e30, 1e30), st.integers(1, 9))
def test_equal_values_are_exactly_their_mean(value: float, size: int) -> None:
    values_K, ids_K = torch.full((size,), value), torch.zeros(size, dtype=torch.int64)
    assert (above_least(values_K, ids_K) == 0).all()
    assert (standardised(values_K, ids_K) == 0).all()
    assert not has_spread(values_K, ids_K).any()


def test_whitened_values_by_hand() -> None:
    # 1 2 6 over the mask: mean 3, squares 4 1 9, unbiased variance 7
    batch = tokens_batch(["0110", "01"], [0.0, 0.0])
    white_N = whiten(torch.tensor([99.0, 1, 2, 99, 99, 6]), batch, alone)
    expected_N = torch.tensor([0.0, -2, -1, 0, 0, 3]).double() / 7**0.5
    torch.testing.assert_close(white_N, expected_N)


@pytest.mark.parametrize("masks", [["0111", "011"], ["0100"], ["00"]])
def test_whitening_equal_values_gives_exactly_zero(masks: list[str]) -> None:
    batch = tokens_batch(masks, [0.0] * len(masks))
    assert (whiten(torch.full((batch.tokens,), 0.1), batch, alone) == 0).all()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.integers(0, 3))
def test_whitening_is_the_same_on_any_number_of_ranks(seed: int, cut: int) -> None:
    whole = random_batch(seed)
    expected_N = whiten(whole.columns["values"], whole, alone)
    shares = [list(range(3 * cut)), list(range(3 * cut, 9))]  # one of them may hold nothing

    def work(rank: int, gather: Gather) -> torch.Tensor:
        if not shares[rank]:
            nothing = tokens_batch(["0"], [0.0], values=[[5.0]])
            return whiten(nothing.columns["values"], nothing, gather)[:0]
        mine = whole.select(shares[rank])
        return whiten(mine.columns["values"], mine, gather)

    torch.testing.assert_close(torch.cat(on_ranks(2, work)), expected_N)
