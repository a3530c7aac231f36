"""Which tokens each mask leaves out: two rollouts of two tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import drift_of, f64

from asyncrl.config.sections.algorithm import CorrectionConfig
from asyncrl.learner.algorithms import corrections
from asyncrl.learner.algorithms.registry import REJECTIONS, alone

SEQ = [0, 0, 1, 1]


def kept(raw: list[float], reject: str, high: float, low: float | None = None) -> str:
    """'+' for a token that is kept, '-' for one that is left out."""
    config = CorrectionConfig(reject=reject, reject_low=low, reject_high=high)
    keep_N = corrections.kept(drift_of(f64(raw).log(), SEQ), config, alone)
    return "".join("+" if keep else "-" for keep in keep_N.tolist())


@pytest.mark.parametrize(
    ("raw", "reject", "low", "high", "expected"),
    [
        # the ratio π_p/μ itself is bounded, not its inverse
        ([1.0, 2.9, 3.1, 0.6], "token_k1", 0.5, 3.0, "++-+"),
        ([1.0, 2.9, 3.1, 0.4], "token_k1", 0.5, 3.0, "++--"),
        ([1.0, 2.9, 0.34, 0.33], "token_k1", None, 3.0, "+++-"),  # low is 1/3
        # ½ log² 2 = 0.2402, the same for ½; k3 of 2 is 0.3069, of ½ 0.1931
        ([2.0, 0.5, 1.0, 3.0], "token_k2", None, 0.25, "+++-"),
        ([2.0, 0.5, 1.0, 3.0], "token_k3", None, 0.25, "-++-"),
        # products 4 and 1
        ([2.0, 2.0, 2.0, 0.5], "seq_sum_k1", None, 3.0, "--++"),
        ([0.5, 0.5, 2.0, 0.5], "seq_sum_k1", None, 3.0, "--++"),
        # sums of k2 0.4805 and 0.2402, of k3 0.6137 and 0.1931
        ([2.0, 2.0, 2.0, 1.0], "seq_sum_k2", None, 0.4, "--++"),
        ([2.0, 2.0, 0.5, 1.0], "seq_sum_k3", None, 0.4, "--++"),
        # geometric means 2 and sqrt(6) = 2.449
        ([2.0, 2.0, 2.0, 3.0], "seq_mean_k1", None, 2.4, "++--"),
        ([0.5, 0.5, 0.5, 0.33], "seq_mean_k1", None, 2.4, "++--"),
        ([2.0, 2.0, 2.0, 1.0], "seq_mean_k2", None, 0.2, "--++"),
        ([2.0, 2.0, 0.5, 0.5], "seq_mean_k3", None, 0.2, "--++"),
        ([1.0, 2.1, 0.51, 1.9], "seq_max_k1", None, 2.0, "--++"),
        ([1.0, 0.4, 0.51, 1.9], "seq_max_k1", None, 2.0, "--++"),
        ([1.0, 2.1, 0.51, 1.9], "seq_max_k2", None, 0.25, "--++"),
        ([1.0, 2.0, 0.5, 0.5], "seq_max_k3", None, 0.25, "--++"),
        ([9.0, 0.1, 1.0, 1.0], "none", None, 2.0, "++++"),
    ],
)
def test_by_hand(raw: list[float], reject: str, low: float | None, high: float, expected: str) -> None:
    assert kept(raw, reject, high, low) == expected


def test_several_criteria_judge_the_whole_mask_each() -> None:
    """Ratios 2 and 1 in one rollout, 9 and 1 in the other: a token goes by itself, a rollout by all its tokens."""
    config = CorrectionConfig(
        reject="token_k1", reject_low=0.1, reject_high=1.5, also_reject={"seq_max_k2": 1.0, "token_k3": 9.0}
    )
    keep_N = corrections.kept(drift_of(f64([2.0, 1.0, 9.0, 1.0]).log(), SEQ), config, alone)
    assert keep_N.tolist() == [False, True, False, False]


@pytest.mark.parametrize("reject", sorted(REJECTIONS))
def test_tokens_outside_the_mask_have_no_part(reject: str) -> None:
    config = CorrectionConfig(reject=reject, reject_high=1.5)
    mask = [False, True, True, False, True]
    for outside in (1.0, 1e6):
        drift = drift_of(f64([outside, 1.0, 1.1, outside, 0.9]).log(), [0, 0, 0, 1, 1], mask)
        assert corrections.kept(drift, config, alone).tolist() == mask


@pytest.mark.parametrize(
    ("tau", "expected"),
    [
        (0.7, "++++"),  # squares .01 .04 .09 2.56: all of them have mean 0.675
        (0.6, "+++-"),  # without the largest 0.0467
        (0.04, "++--"),  # then 0.025
        (0.02, "+---"),
        (0.005, "----"),
    ],
)
def test_m2po_leaves_out_the_largest_until_the_second_moment_is_small(tau: float, expected: str) -> None:
    raw = f64([0.1, -0.2, 0.3, -1.6]).exp().tolist()
    assert kept(raw, "m2po", tau) == expected


def test_m2po_treats_equals_alike() -> None:
    raw = f64([0.1, 0.5, 0.5, 0.1]).exp().tolist()  # with one 0.5 the mean would be 0.09
    assert kept(raw, "m2po", 0.1) == "+--+"


@pytest.mark.parametrize("count", [1, 3, 10, 30, 1000])
@pytest.mark.parametrize("log_w", [0.1, 0.2, 0.3, 0.7])
def test_m2po_keeps_any_number_of_tokens_at_the_bound(count: int, log_w: float) -> None:
    def share(tau: float) -> float:
        config = CorrectionConfig(reject="m2po", reject_high=tau)
        drift = drift_of(f64([log_w] * count), [0] * count)
        return corrections.kept(drift, config, alone).double().mean().item()

    assert share(log_w**2) == 1
    assert share(log_w**2 * 0.999) == 0


@pytest.mark.parametrize("count", [1, 4, 50, 333])
def test_m2po_keeps_a_mixture_whose_mean_is_the_bound(count: int) -> None:
    config = CorrectionConfig(reject="m2po", reject_high=0.05)  # (0.1² + 0.3²) / 2
    assert corrections.kept(drift_of(f64([0.1, 0.3] * count), [0, 0] * count), config, alone).all()


@pytest.mark.parametrize(("log_w", "high", "expected"), [(1e-4, 6e-9, "+"), (1e-4, 4e-9, "-")])
def test_k3_near_0_in_float32(log_w: float, high: float, expected: str) -> None:
    """½ · 10⁻⁸, of which exp − 1 leaves no digit."""
    config = CorrectionConfig(reject="token_k3", reject_high=high)
    keep_N = corrections.kept(drift_of(torch.tensor([log_w]), [0]), config, alone)
    assert keep_N.tolist() == [expected == "+"]


@given(log_w=st.lists(st.floats(-3, 3), min_size=4, max_size=4), tau=st.floats(1e-3, 9))
def test_what_m2po_keeps_has_a_second_moment_of_at_most_tau(log_w: list[float], tau: float) -> None:
    signs = kept(f64(log_w).exp().tolist(), "m2po", tau)
    squares = [x * x for x, sign in zip(log_w, signs, strict=True) if sign == "+"]
    out = [x * x for x, sign in zip(log_w, signs, strict=True) if sign == "-"]
    assert sum(squares) <= (tau + 1e-9) * len(squares)
    assert max(squares, default=0) <= min(out, default=9) + 1e-9


@pytest.mark.parametrize("reject", sorted(REJECTIONS))
def test_no_difference_is_kept_and_an_absurd_one_is_not(reject: str) -> None:
    assert kept([1.0] * 4, reject, 2.0) == "++++"
    if reject != "none":
        assert kept([1.0, 1.0, 1e300, 1e300], reject, 2.0) == "++--"


@pytest.mark.parametrize("reject", sorted(set(REJECTIONS) - {"none", "m2po"}))
def test_a_rollout_without_policy_tokens_is_no_trouble(reject: str) -> None:
    config = CorrectionConfig(reject=reject, reject_high=2.0)
    got_N = corrections.kept(drift_of(f64([0.1, torch.nan]), [0, 1], mask=[True, False]), config, alone)
    assert got_N.tolist() == [True, False]
