from __future__ import annotations

import pytest
import torch
from advantage_cases import tokens_batch
from loss_cases import f64

from asyncrl.learner.training.objectives import ValueObjective, value_loss


@pytest.mark.parametrize(
    ("value", "clip", "expected"),  # V_old = 1, G = 2: (loss, slope, clipped)
    [
        (1.4, 0.5, (0.18, -0.6, False)),
        (1.8, 0.5, (0.125, 0.0, True)),  # held at 1.5, farther from 2 than 1.8 is
        (0.2, 0.5, (1.62, -1.8, False)),  # held at 0.5, nearer than 0.2: the larger square counts
        (3.0, 0.5, (0.5, 1.0, False)),  # held at 1.5, nearer than 3
        (1.8, None, (0.02, -0.2, False)),
    ],
)
def test_by_hand(value: float, clip: float | None, expected: tuple[float, float, bool]) -> None:
    values_N = f64([value]).requires_grad_()
    loss_N, clipped_N = value_loss(values_N, f64([1.0]), f64([2.0]), clip)
    (slope_N,) = torch.autograd.grad(loss_N.sum(), values_N)
    assert (loss_N.item(), slope_N.item(), bool(clipped_N)) == pytest.approx(expected)


def test_where_the_old_value_says_nothing_of_the_new_one_only_the_return_counts() -> None:
    values_N = torch.linspace(-3, 3, 13, dtype=torch.float64)
    free = value_loss(values_N, values_N, torch.zeros(13).double(), 0.5)
    torch.testing.assert_close(free.loss_N, 0.5 * values_N**2)
    assert not free.clipped_N.any()


def test_the_objective_of_a_critic_holds_its_values_near_the_old_ones() -> None:
    """V_old = 1 and G = 2 at two policy tokens of three; V is 1.8, which counts as 1.5, and 3."""
    batch = tokens_batch(["011"], [0.0]).with_columns(values=f64([9, 1, 1]), returns=f64([9, 2, 2]))
    values_N = f64([5, 1.8, 3.0]).requires_grad_()
    total, metrics = ValueObjective("critic", "values", "returns", 0.5)(batch, values_N)
    (slope_N,) = torch.autograd.grad(total, values_N)
    assert total.item() == pytest.approx(0.125 + 0.5)
    assert slope_N.tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert metrics.values() == {"train/critic/clip_fraction": 0.5}
