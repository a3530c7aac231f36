"""Groups and versions of the weights, which the parties of a replay make for each other.

    replayed generators ── put ──▸ GroupStore ─── take ──▸ replayed learner
    replayed generators ◂── get ── WeightStore ◂── put ─── replayed learner

Both know from the decisions how often each entry is wanted, and forget it after that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.learner.reporting.version_decisions import mark_of
from asyncrl.queue.wire.payload import decode_group, encode_group
from asyncrl.sync.tensors.shards import Shards
from asyncrl.telemetry.decisions import ClaimedGroup
from asyncrl.types import Group, Version


class GroupStore:
    """wanted: all claims of all versions to be trained, one entry each"""

    def __init__(self, wanted: Iterable[ClaimedGroup]) -> None:
        self._wanted = Counter(wanted)
        self._ordinals = {one.ordinal for one in self._wanted}
        self._groups: dict[ClaimedGroup, Group] = {}
        self._others: defaultdict[int, set[int]] = defaultdict(set)

    def put(self, group: Group) -> None:
        """As the queue carries it."""
        group = decode_group([bytes(frame) for frame in encode_group(group).frames])
        claimed = ClaimedGroup(group.task.ordinal, mark_of(group))
        if self._wanted[claimed]:
            self._groups[claimed] = group
        elif claimed.ordinal in self._ordinals:
            self._others[claimed.ordinal].add(claimed.mark)

    def has(self, claimed: ClaimedGroup) -> bool:
        return claimed in self._groups

    def others(self, ordinal: int) -> int:
        """The number of different groups of this task that were made and that nobody wants."""
        return len(self._others[ordinal])

    def take(self, claimed: ClaimedGroup) -> Group:
        group = self._groups[claimed]
        self._wanted[claimed] -= 1
        if not self._wanted[claimed]:
            del self._groups[claimed]
        return group


class Published(NamedTuple):
    """A version of the weights. A learner that begins anew from a checkpoint has another lineage."""

    lineage: int
    version: Version


class WeightStore:
    """wanted: the flips of all generators, one entry each"""

    def __init__(self, wanted: Iterable[Published]) -> None:
        self._wanted = Counter(wanted)
        self._weights: dict[Published, Mapping[str, Tensor]] = {}

    def put(self, published: Published, live: Shards) -> None:
        """Copy the weights, if some generator flips to them."""
        if self._wanted[published]:
            self._weights[published] = {name: _whole(live, name) for name in live.tensors}

    def has(self, published: Published) -> bool:
        return published in self._weights

    def take(self, published: Published) -> Mapping[str, Tensor]:
        weights = self._weights[published]
        self._wanted[published] -= 1
        if not self._wanted[published]:
            del self._weights[published]
        return weights


def _whole(live: Shards, name: str) -> Tensor:
    """A copy of one parameter, of which this process has every element."""
    layout, parts = live.layout[name], live.tensors[name]
    whole = torch.empty(layout.shape, dtype=parts[0].dtype, device=parts[0].device)
    for box, part in zip(layout.boxes, parts, strict=True):
        whole[box.slices()].copy_(part)
    return whole
