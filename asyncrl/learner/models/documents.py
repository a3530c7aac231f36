"""The documents of a packed row of tokens: their boundaries, the part of this rank, and buckets of similar length.

    packed        5 6 7 8 | 5 6 9 3 | …        documents, one after another
    row           5 6 7 8 | 9 3 | …            the tokens that layers compute, see `shared_prompts.py`
    mine          this rank's part of the row, see `context.py`
    buckets       [D, L] padded documents, for attention and for layers with a state; gathered from the row

Axes:  N packed tokens · M tokens of the row · n of them, this rank's · P places of all buckets · D documents of one
bucket · L longest of them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.device import accelerator
from asyncrl.device.copies import on_device
from asyncrl.learner.parallel.context import ContextParallel
from asyncrl.models.vision import MediaInputs

GROWTH, SLACK = 1.35, 8
"""Documents share a bucket while the longest is within GROWTH times, or SLACK tokens of, the shortest: that gives few
large attention calls with little padding."""


class LengthBucket(NamedTuple):
    """Documents of similar length.

    index_DL: the place of each token in the packed sequence, clamped past a document's end · keep_DL: which are real
    index_Dn, keep_Dn: the same of the tokens whose attention is computed: of all, or of those after a repeated prompt
    before_D: the tokens before these
    """

    index_DL: Tensor
    keep_DL: Tensor
    index_Dn: Tensor
    keep_Dn: Tensor
    before_D: Tensor | None


class BucketPlaces(NamedTuple):
    """A gather from the row of computed tokens to padded buckets, and back.

    take_P: the place in the row of each place of all buckets in order · back_M: the inverse · shapes: of the buckets
    """

    take_P: Tensor
    back_M: Tensor
    shapes: list[torch.Size]

    def padded(self, *values_M: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """[D, L, …] of each of these values for each bucket, padding at the end of documents."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = [values.index_select(0, self.take_P).split(sizes) for values in values_M]
        for shape, *bucket in zip(self.shapes, *parts, strict=True):
            yield tuple(part.unflatten(0, shape) for part in bucket)

    def unpadded(self, parts: Sequence[Tensor]) -> Tensor:
        """[M, …], the inverse of `padded` for one value."""
        return torch.cat([part_DL.flatten(0, 1) for part_DL in parts]).index_select(0, self.back_M)


class Documents:
    """Boundaries of packed documents, in the forms that attention kernels take. Each is computed on first use, on the
    CPU, and copied to the device: there a shape that depends on values would make this thread wait."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | None = None,
        context: ContextParallel | None = None,
        multiple: int = 1,
        mask_N: Tensor | None = None,
        media: MediaInputs | None = None,
        source_N: Tensor | None = None,
    ) -> None:
        """context: the ranks that share the tokens; None: this rank has all of them. multiple: a last document of
        padding makes each rank's tokens a multiple of it. mask_N: the loss mask, on the CPU; for heads alone.
        media: what the tokens show. source_N: see `shared_prompts.py`; None: each token is computed."""
        packed, own = torch.arange(sum(lengths)), tuple(lengths)
        self.source_N = packed if source_N is None else source_N
        self.shares = source_N is not None
        if source_N is not None:
            computed_N = F.pad((source_N == packed).cumsum(0), (1, 0))
            own = tuple(computed_N[_edges(lengths)].diff().tolist())
        padding = -sum(own) % (multiple * (context.multiple if context else 1))
        self.lengths = (*lengths, padding) if padding else tuple(lengths)
        self.own = (*own, padding) if padding else own
        self._padded = padding > 0
        self.device, self.context, self._mask_N = device, context, mask_N
        self.media = media

    @cached_property
    def boundaries(self) -> Tensor:
        """[documents + 1] int32: 0, then where each document ends."""
        return on_device(_edges(self.lengths), self.device)

    @cached_property
    def own_boundaries(self) -> Tensor:
        """[documents + 1] int32: 0, then where the computed tokens of each document end."""
        return on_device(_edges(self.own), self.device) if self.shares else self.boundaries

    @cached_property
    def spans(self) -> list[slice]:
        """The part of this rank of the row of computed tokens, as slices of equal length."""
        tokens = sum(self.own)
        return self.context.spans(tokens) if self.context else [slice(0, tokens)]

    def mine(self, values_N: Tensor) -> Tensor:
        """[n, …]: this rank's part of values [N, …] that every rank has, without repeated tokens, 0 for padding."""
        if self.shares:
            here = values_N.device == accelerator.CPU
            values_N = values_N.index_select(0, self._computed if here else self._computed_there)
        others = (0, 0) * (values_N.dim() - 1)
        padded_N = F.pad(values_N, (*others, 0, sum(self.own) - len(values_N)))
        return torch.cat([padded_N[span] for span in self.spans])

    @cached_property
    def _computed(self) -> Tensor:
        """On the CPU: the packed tokens that are computed, without padding."""
        return torch.nonzero(self.source_N == torch.arange(len(self.source_N)))[:, 0]

    @cached_property
    def _computed_there(self) -> Tensor:
        return on_device(self._computed, self.device)

    @cached_property
    def row_N(self) -> Tensor:
        """On the CPU: the place of the state of each packed token, padding included, among the computed ones of all
        ranks."""
        padding = sum(self.lengths) - len(self.source_N)
        place_N = torch.empty_like(self.source_N).index_copy(
            0, self._computed, torch.arange(len(self._computed))
        )
        return torch.cat([place_N[self.source_N], len(self._computed) + torch.arange(padding)])

    @cached_property
    def state_N(self) -> Tensor:
        """On the CPU: the place of the state of each packed token in this rank's part; -1 where another rank has it."""
        row = torch.arange(sum(self.own))
        mine_n = torch.cat([row[span] for span in self.spans])
        return torch.full_like(row, -1).index_copy(0, mine_n, torch.arange(len(mine_n)))[self.row_N]

    def place(self, at_T: Tensor) -> Tensor:
        """The places of packed tokens in this rank's part; -1 for those that it does not compute. On the CPU."""
        return torch.where(self.source_N[at_T] == at_T, self.state_N[at_T], -1)

    @cached_property
    def scored(self) -> tuple[Tensor, Tensor]:
        """(the tokens under the loss mask whose state before them is on this rank, the places of these states)."""
        if self._mask_N is None:
            raise ValueError("a head needs documents with a loss mask")
        at_T = torch.nonzero(self._mask_N)[:, 0]
        return self.here(at_T, self.state_N[at_T - 1])

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """(the documents whose last token is on this rank, the places of these tokens), without padding."""
        count = len(self.lengths) - self._padded
        ends_R = torch.tensor(self.lengths[:count]).cumsum(0) - 1
        return self.here(torch.arange(count), self.state_N[ends_R])

    def here(self, which_T: Tensor, place_T: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs (which, place) whose place is on this rank, on the device."""
        here_T = place_T >= 0
        return on_device(which_T[here_T], self.device), on_device(place_T[here_T], self.device)

    def whole(self, part: Tensor) -> Tensor:
        """See `ContextParallel.whole`."""
        return self.context.whole(part) if self.context else part

    @cached_property
    def cuts(self) -> list[DocumentSlice]:
        """The documents in each of `spans`."""
        if self.shares:
            raise ValueError("a slice of the row is none of whole documents, and prompts are shared")
        return [DocumentSlice.of(self.lengths, span.start, span.stop, self.device) for span in self.spans]

    @cached_property
    def buckets(self) -> list[LengthBucket]:
        """On the CPU, but for before_D. Repeated prompts are left out of the queries where they are the greater part:
        a mask costs about as much as half of the queries. On a GPU they stay: torch's flash kernels take no mask."""
        whole, cut = list[int](), list[int]()
        masks = self.device in (None, accelerator.CPU)
        for document, (own, length) in enumerate(zip(self.own, self.lengths, strict=True)):
            (cut if masks and 2 * own < length else whole).append(document)
        runs = (run for alike in _alike(cut, self.own) for run in _alike(alike, self.lengths))
        alike = [self._bucket(members, cut=False) for members in _alike(whole, self.lengths)]
        return alike + [self._bucket(members, cut=True) for members in runs]

    def _bucket(self, members: Sequence[int], cut: bool) -> LengthBucket:
        length_D, own_D = torch.tensor(self.lengths), torch.tensor(self.own)
        start_D = (length_D.cumsum(0) - length_D)[members]
        length_D, own_D = length_D[members], own_D[members]
        whole = _clamped(start_D, length_D)
        if not cut:
            return LengthBucket(*whole, *whole, None)
        before_D = length_D - own_D
        return LengthBucket(*whole, *_clamped(start_D + before_D, own_D), on_device(before_D, self.device))

    @cached_property
    def keys(self) -> BucketPlaces:
        """The places of whole documents."""
        return self._places([(bucket.index_DL, bucket.keep_DL) for bucket in self.buckets])

    @cached_property
    def queries(self) -> BucketPlaces:
        """The places of the tokens whose attention is computed."""
        if all(bucket.before_D is None for bucket in self.buckets):
            return self.keys
        return self._places([(bucket.index_Dn, bucket.keep_Dn) for bucket in self.buckets])

    def _places(self, buckets: Sequence[tuple[Tensor, Tensor]]) -> BucketPlaces:
        tokens_P = torch.cat([index.flatten() for index, _ in buckets])
        real_P = torch.nonzero(torch.cat([keep.flatten() for _, keep in buckets]))[:, 0]
        place_N = torch.zeros_like(self.row_N).scatter_(0, tokens_P[real_P], real_P)
        padding = torch.arange(len(self.source_N), len(self.row_N))
        take_P, back_M = self.row_N[tokens_P], place_N[torch.cat([self._computed, padding])]
        shapes = [index.shape for index, _ in buckets]
        return BucketPlaces(on_device(take_P, self.device), on_device(back_M, self.device), shapes)

    @cached_property
    def row_there_N(self) -> Tensor:
        """`row_N` on the device."""
        return on_device(self.row_N, self.device)


def _alike(documents: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Runs of documents of similar length."""
    order = sorted(documents, key=lengths.__getitem__)
    at = 0
    while at < len(order):
        shortest = lengths[order[at]]
        limit = max(shortest * GROWTH, shortest + SLACK)
        stop = next((i for i in range(at, len(order)) if lengths[order[i]] > limit), len(order))
        yield order[at:stop]
        at = stop


def _clamped(start_D: Tensor, length_D: Tensor) -> tuple[Tensor, Tensor]:
    """([D, L] places from each start on, clamped past its length; which are real)."""
    step_L = torch.arange(int(length_D.max()))
    return start_D[:, None] + step_L.minimum(length_D[:, None] - 1), step_L < length_D[:, None]


def _edges(lengths: Sequence[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


@dataclass(frozen=True)
class DocumentSlice:
    """The documents in a slice of packed tokens.

    documents: their parts in the slice · before: tokens of the first document that lie before the slice · seen: the
    keys that queries of the slice attend to, from the first document's first token on
    """

    documents: Documents
    before: int
    seen: slice

    @staticmethod
    def of(
        lengths: Sequence[int], start: int, stop: int, device: torch.device | None = None
    ) -> DocumentSlice:
        """The slice start … stop - 1 of documents of these lengths.

        With lengths 3, 4, 2, tokens 2 … 4 are the last of the first document, which has 2 before it, and 2 of the
        second; they attend to keys 0 … 4.
        """
        parts: list[int] = []
        at = before = 0
        for length in lengths:
            low, high = max(at, start), min(at + length, stop)
            if low < high:
                before = before if parts else low - at
                parts.append(high - low)
            at += length
        return DocumentSlice(Documents(parts, device), before, slice(start - before, stop))

    @cached_property
    def others(self) -> Documents:
        """All documents but the first."""
        return Documents(self.documents.lengths[1:], self.documents.device)

    @cached_property
    def key_boundaries(self) -> Tensor:
        """[documents + 1] int32: the boundaries of documents in `seen`."""
        edges = self.documents.boundaries + self.before
        edges[0] = 0
        return edges

    @property
    def longest(self) -> int:
        """The largest number of keys in one document."""
        first, *others = self.documents.lengths
        return max(first + self.before, *others)
