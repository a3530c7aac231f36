"""A slice of packed tokens sees what the whole would."""

from __future__ import annotations

from typing import Literal, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup

from asyncrl.learner.models.attention import slice_attention, whole_attention
from asyncrl.learner.models.documents import Documents, DocumentSlice
from asyncrl.learner.parallel.context import ContextParallel

QUERY_HEADS, KEY_HEADS, SIZE = 4, 2, 8


def test_a_cut_through_a_document_by_hand() -> None:
    """Documents aaa bbbb cc, tokens 2 … 4: a | bb."""
    middle = DocumentSlice.of([3, 4, 2], 2, 5)
    assert (middle.documents.lengths, middle.before, middle.seen) == ((1, 2), 2, slice(0, 5))
    assert middle.documents.boundaries.tolist() == [0, 1, 3]
    assert middle.key_boundaries.tolist() == [0, 3, 5]
    assert middle.longest == 3
    last = DocumentSlice.of([3, 4, 2], 6, 9)
    assert (last.documents.lengths, last.before, last.seen) == ((1, 2), 3, slice(3, 9))
    at_an_edge = DocumentSlice.of([3, 4, 2], 3, 6)
    assert (at_an_edge.documents.lengths, at_an_edge.before, at_an_edge.seen) == ((3,), 0, slice(3, 6))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 4))
def test_slices_together_are_the_whole_and_so_are_their_gradients(lengths: list[int], ranks: int) -> None:
    documents = Documents([*lengths, padding] if (padding := -sum(lengths) % ranks) else lengths)
    tokens = sum(documents.lengths)
    random = torch.Generator().manual_seed(tokens)
    query, key, value, weights = (
        torch.randn(tokens, heads, SIZE, generator=random, dtype=torch.float64)
        for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS, QUERY_HEADS)
    )
    said = []
    for ways in (1, ranks):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        share = tokens // ways
        out = torch.cat(
            [
                slice_attention(
                    inputs[0][at : at + share],
                    *inputs[1:],
                    DocumentSlice.of(documents.lengths, at, at + share),
                )
                for at in range(0, tokens, share)
            ]
        )
        (out * weights).sum().backward()
        said.append([out, *(x.grad for x in inputs)])
    torch.testing.assert_close(said[1], said[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(said[0][0], whole_attention(query, key, value, documents), atol=1e-12, rtol=0)


class Ranks:
    """A process group of which nothing but places is asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def test_slices_of_two_ranks_by_hand() -> None:
    def documents(rank: int, way: Literal["ulysses", "all_gather"]) -> Documents:
        return Documents([7, 3], context=ContextParallel(cast(ProcessGroup, Ranks(rank, 2)), way))

    assert documents(0, "ulysses").lengths == (7, 3)
    assert [documents(rank, "ulysses").spans for rank in range(2)] == [[slice(0, 5)], [slice(5, 10)]]
    early_and_late = [documents(rank, "all_gather") for rank in range(2)]
    assert early_and_late[0].lengths == (7, 3, 2)
    assert [d.spans for d in early_and_late] == [[slice(0, 3), slice(9, 12)], [slice(3, 6), slice(6, 9)]]
    assert early_and_late[0].mine(torch.arange(1, 11)).tolist() == [1, 2, 3, 10, 0, 0]
    assert early_and_late[0].state_N.tolist() == [0, 1, 2, -1, -1, -1, -1, -1, -1, 3, 4, 5]
