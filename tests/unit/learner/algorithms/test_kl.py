from __future__ import annotations

from math import exp, log
from typing import get_args, get_type_hints

import pytest
import torch
from learner_cases import ORACLE, flat
from loss_cases import f64

from asyncrl.config.sections.algorithm import KlLossConfig, ShapingConfig
from asyncrl.learner.algorithms.losses.policy_loss import kl

FORMS = get_args(get_type_hints(KlLossConfig)["form"])


def value_and_slope(log_ratio: float, form: str) -> tuple[float, float]:
    """Of a token with log π − log π_ref = log_ratio; the slope by log π."""
    logp_N = f64([-1.0 + log_ratio]).requires_grad_()
    value_N = kl(logp_N, f64([-1.0]), form)
    return value_N.item(), torch.autograd.grad(value_N.sum(), logp_N)[0].item()


@pytest.mark.parametrize(
    ("form", "value", "slope"),
    [
        ("k1", log(2), 1.0),
        ("abs", log(2), 1.0),
        ("k2", log(2) ** 2 / 2, log(2)),
        ("k3", 0.5 - 1 + log(2), 1 - 0.5),  # r = π_ref / π = ½
        ("k1+", log(2), log(2)),
        ("k3+", 0.5 - 1 + log(2), log(2)),
        ("abs+", log(2), log(2)),
    ],
)
def test_by_hand(form: str, value: float, slope: float) -> None:
    assert value_and_slope(log(2), form) == pytest.approx((value, slope))


@pytest.mark.parametrize("form", sorted(ORACLE["kl"]))
def test_agrees_with_the_oracle(form: str) -> None:
    logp_N = flat(ORACLE["inputs"]["log_prob"]).requires_grad_()
    value_N = kl(logp_N, flat(ORACLE["inputs"]["ref_log_prob"]), form)
    (slope_N,) = torch.autograd.grad(value_N.sum(), logp_N)
    torch.testing.assert_close(value_N.detach(), flat(ORACLE["kl"][form]["val"]), atol=1e-6, rtol=0)
    torch.testing.assert_close(slope_N, flat(ORACLE["kl"][form]["grad"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_absurd_log_ratios_stay_finite(form: str, log_ratio: float) -> None:
    value, slope = value_and_slope(log_ratio, form)
    assert abs(value) <= 0.5e8
    assert abs(slope) <= 1e4


@pytest.mark.parametrize("log_ratio", [1e-3, -1e-3, 1e-5, 1e-7])
def test_k3_keeps_its_digits_near_0_in_float32(log_ratio: float) -> None:
    """½ x² up to a third power. With exp(x) − 1 in the place of expm1 nothing of it is left, or it is negative."""
    value = kl(torch.zeros(1), torch.tensor([log_ratio]), "k3").item()
    assert value == pytest.approx(log_ratio**2 / 2, abs=6e-8 * abs(log_ratio), rel=1e-3)
    assert value >= 0


def test_k3_is_clamped_as_in_verl() -> None:
    assert value_and_slope(-5.0, "k3") == (10.0, 0.0)  # e^5 − 1 − 5 is far above 10
    assert value_and_slope(30.0, "k3")[0] == pytest.approx(10.0)
    assert value_and_slope(5.0, "k3")[0] == pytest.approx(exp(-5) - 1 + 5)


def test_a_plus_changes_the_gradient_alone() -> None:
    for log_ratio in (-2.0, 0.0, 0.3):
        for form in ("k1", "k3"):
            assert value_and_slope(log_ratio, form + "+")[0] == value_and_slope(log_ratio, form)[0]
            assert value_and_slope(log_ratio, form + "+")[1] == pytest.approx(log_ratio)


def test_every_form_of_the_configuration_is_known() -> None:
    assert set(get_args(get_type_hints(ShapingConfig)["kl_form"])) <= set(FORMS)
    for form in FORMS:
        assert value_and_slope(0.0, form)[0] == 0
