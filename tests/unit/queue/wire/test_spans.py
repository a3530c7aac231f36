"""Versions and loss mask come back from their spans; spans that are none are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WireError
from asyncrl.queue.wire.payload import from_spans, to_spans

TOKENS = st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 1), st.integers(1, 5)), max_size=12)


def test_spans_of_the_docstring() -> None:
    versions, mask = np.array([-1, -1, 7, 7, 7, 8, -1, 8]), np.array([0, 0, 1, 1, 1, 1, 0, 1], np.int8)
    ends, of_spans, masks = to_spans(versions, mask)
    assert ends.tolist() == [2, 5, 6, 7, 8]
    assert of_spans.tolist() == [-1, 7, 8, -1, 8]
    assert masks.tolist() == [0, 1, 1, 0, 1]


@given(TOKENS)
def test_any_tokens_come_back(pieces: list[tuple[int, int, int]]) -> None:
    versions = np.array([version for version, _, n in pieces for _ in range(n)], np.int32)
    mask = np.array([bit for _, bit, n in pieces for _ in range(n)], np.int8)
    ends, of_spans, masks = to_spans(versions, mask)
    assert len(ends) == sum(
        i == 0 or (versions[i], mask[i]) != (versions[i - 1], mask[i - 1]) for i in range(len(mask))
    )
    again = from_spans(ends.astype(np.uint32), of_spans, masks, len(mask))
    for back, sent in zip(again, (versions, mask), strict=True):
        assert (back.dtype, back.tolist()) == (sent.dtype, sent.tolist())


@pytest.mark.parametrize("ends", [[], [3], [5], [4, 4], [2, 1, 4], [2, 0, 4], [0, 4], [(1 << 32) - 1, 4]])
def test_spans_that_are_not_one_after_another_are_refused(ends: list[int]) -> None:
    values = np.zeros(len(ends), np.int32)
    with pytest.raises(WireError, match=f"{len(ends)} spans that cover"):
        from_spans(np.array(ends, np.uint32), values, values.astype(np.int8), 4)
