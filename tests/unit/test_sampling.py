"""Counter-based draws: reproducible, uniform, independent of the batch, and with the right log-probs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.draws import stream_key, uniform, uniform_at
from asyncrl.generator.sampling import draw

LOGITS = torch.tensor([0.0, math.log(2.0), math.log(5.0), -math.inf])  # probabilities 1/8, 2/8, 5/8, 0


def drawn(rows: int, temperature: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    uniform_R = uniform(seed, np.arange(rows), 0, 0)
    return draw(LOGITS.expand(rows, -1), np.full(rows, temperature), uniform_R)


def test_the_generator_is_the_published_splitmix64() -> None:
    # First output for state 0 in the reference implementation.
    assert uniform_at(np.array(0, np.uint64), 0) == (0xE220A8397B1DCDAF >> 12) * 2.0**-52 + 2.0**-53


def test_uniform_numbers_fill_every_bin_alike() -> None:
    ordinal, sample, position = np.ix_(np.arange(50), np.arange(8), np.arange(100))
    numbers = uniform(7, ordinal, sample, position).ravel()
    counts, _ = np.histogram(numbers, bins=20, range=(0.0, 1.0))
    expected = numbers.size / 20
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 43.8  # 99.9 % quantile at 19 degrees of freedom; the numbers are fixed
    assert len(np.unique(numbers)) == numbers.size


def test_every_part_of_the_counter_matters() -> None:
    base = (1, 2, 3, 4)
    numbers = {float(uniform(*base))}
    for part in range(4):
        other = list(base)
        other[part] += 1
        numbers.add(float(uniform(*other)))
    assert len(numbers) == 5


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**62), st.integers(0, 1000), st.integers(0, 10**6))
def test_a_scalar_draw_is_the_element_of_a_vector_draw(seed: int, ordinal: int, sample: int, at: int) -> None:
    alone = float(uniform(seed, ordinal, sample, at))
    among = uniform_at(stream_key(seed, np.array([ordinal + 1, ordinal]), sample), np.array([at, at]))
    assert 0.0 < alone < 1.0
    assert among[1] == alone


def test_tokens_come_with_the_frequency_of_their_probability() -> None:
    tokens, logp = drawn(40_000, temperature=1.0)
    shares = np.bincount(tokens, minlength=4) / tokens.size
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8, 0.0], abs=0.01)
    assert np.exp(logp[tokens == 1]) == pytest.approx(2 / 8)


def test_temperature_changes_the_distribution_and_the_log_prob() -> None:
    tokens, logp = drawn(40_000, temperature=0.5)  # squared odds 1 : 4 : 25
    shares = np.bincount(tokens, minlength=4) / tokens.size
    assert shares == pytest.approx([1 / 30, 4 / 30, 25 / 30, 0.0], abs=0.01)
    assert np.exp(logp[tokens == 2]) == pytest.approx(25 / 30)


def test_greedy_takes_the_most_likely_token_with_its_log_prob_at_temperature_one() -> None:
    tokens, logp = drawn(100, temperature=0.0)
    assert set(tokens) == {2}
    assert logp == pytest.approx(math.log(5 / 8))


def test_greedy_and_drawn_rows_do_not_disturb_each_other() -> None:
    temperature_R = np.array([1.0, 0.0, 0.5, 1.0])
    uniform_R = uniform(0, np.arange(4), 0, 0)
    tokens, logp = draw(LOGITS.expand(4, -1), temperature_R, uniform_R)
    for row in range(4):
        at = slice(row, row + 1)
        alone = draw(LOGITS[None], temperature_R[at], uniform_R[at])
        assert (alone[0][0], alone[1][0]) == (tokens[row], logp[row])


def test_the_extremes_of_the_uniform_number_hit_tokens_that_have_probability() -> None:
    lowest, highest = 2.0**-53, 1.0 - 2.0**-53
    logits_RV = torch.tensor([[-math.inf, 0.0, 0.1, -math.inf]] * 2)
    tokens, _ = draw(logits_RV, np.ones(2), np.array([lowest, highest]))
    assert list(tokens) == [1, 2]


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(FloatingPointError):
        draw(torch.tensor([[0.0, math.nan]]), np.ones(1), np.array([0.5]))
