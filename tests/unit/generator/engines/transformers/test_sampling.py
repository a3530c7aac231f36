"""Counter-based draws: reproducible, uniform, independent of the batch, and with the right log-probs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.counter_rng import stream_key, uniform, uniform_at
from asyncrl.generator.engines.transformers.rows import Support, sample_tokens

LOGITS = torch.tensor([0.0, math.log(2.0), math.log(5.0), -math.inf])  # probabilities 1/8, 2/8, 5/8, 0


def drawn(rows: int, temperature: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    uniform_R = uniform(seed, np.arange(rows), 0, 0)
    return sample_tokens(LOGITS.expand(rows, -1), np.full(rows, temperature), uniform_R)


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
    tokens, logp = sample_tokens(LOGITS.expand(4, -1), temperature_R, uniform_R)
    for row in range(4):
        at = slice(row, row + 1)
        alone = sample_tokens(LOGITS[None], temperature_R[at], uniform_R[at])
        assert (alone[0][0], alone[1][0]) == (tokens[row], logp[row])


def test_the_extremes_of_the_uniform_number_hit_tokens_that_have_probability() -> None:
    lowest, highest = 2.0**-53, 1.0 - 2.0**-53
    logits_RV = torch.tensor([[-math.inf, 0.0, 0.1, -math.inf]] * 2)
    tokens, _ = sample_tokens(logits_RV, np.ones(2), np.array([lowest, highest]))
    assert list(tokens) == [1, 2]


def of_all_rows(rows: int, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Support:
    return Support(np.full(rows, top_p), np.full(rows, top_k), np.full(rows, min_p))


# Probabilities 1/8, 2/8, 5/8: what is left, and what it has.
CUTS = {
    "top_k": ({"top_k": 2}, [0, 2 / 7, 5 / 7]),
    "top_k beyond the vocabulary": ({"top_k": 9}, [1 / 8, 2 / 8, 5 / 8]),
    "top_p just met by the likeliest": ({"top_p": 0.625}, [0, 0, 1]),
    "top_p not quite met": ({"top_p": 0.63}, [0, 2 / 7, 5 / 7]),
    "top_p of next to nothing": ({"top_p": 1e-9}, [0, 0, 1]),
    "min_p": ({"min_p": 0.39}, [0, 2 / 7, 5 / 7]),
    "min_p that the rarest still meets": ({"min_p": 0.19}, [1 / 8, 2 / 8, 5 / 8]),
    "top_p of what top_k left": ({"top_p": 0.7, "top_k": 2}, [0, 0, 1]),
    "top_p of what min_p left": ({"top_p": 0.72, "min_p": 0.39}, [0, 2 / 7, 5 / 7]),
}


@pytest.mark.parametrize(("cut", "left"), CUTS.values(), ids=CUTS.keys())
def test_a_cut_support_is_drawn_from_and_its_log_probs_are_of_what_is_left(
    cut: dict[str, float], left: list[float]
) -> None:
    rows = 20_000
    uniform_R = uniform(0, np.arange(rows), 0, 0)
    support = of_all_rows(rows, **cut)  # type: ignore[arg-type]
    tokens, logp = sample_tokens(LOGITS.expand(rows, -1), np.ones(rows), uniform_R, support)
    assert np.bincount(tokens, minlength=4) / rows == pytest.approx([*left, 0.0], abs=0.015)
    assert np.exp(logp) == pytest.approx(np.array([*left, 0.0])[tokens])


def test_a_cut_comes_after_the_temperature() -> None:
    # At temperature 0.5 the probabilities are 1/30, 4/30, 25/30: the likeliest alone has the mass 0.8.
    tokens, logp = sample_tokens(LOGITS[None], np.array([0.5]), np.array([0.01]), of_all_rows(1, top_p=0.8))
    assert (tokens.tolist(), logp.tolist()) == ([2], [0.0])


def test_each_row_is_cut_by_its_own_rule_and_a_greedy_one_by_none() -> None:
    support = Support(np.array([1.0, 0.1, 1.0, 0.1]), np.array([0, 0, 1, 1]), np.zeros(4))
    temperature_R, uniform_R = np.array([1.0, 1.0, 1.0, 0.0]), np.full(4, 1e-6)
    tokens, logp = sample_tokens(LOGITS.expand(4, -1), temperature_R, uniform_R, support)
    assert tokens.tolist() == [0, 2, 2, 2]
    assert np.exp(logp) == pytest.approx([1 / 8, 1, 1, 5 / 8])


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(FloatingPointError):
        sample_tokens(torch.tensor([[0.0, math.nan]]), np.ones(1), np.array([0.5]))
