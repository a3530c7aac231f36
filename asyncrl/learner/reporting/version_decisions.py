"""Which groups made a version, and a hash of the weights that came of them, for `telemetry.decisions`.

claims ─▸ marks ─┐
weights ─▸ hash ─┴─▸ one item, in the file before the version is published
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from asyncrl.learner.backends.backend import Backend
from asyncrl.sync.tensors.checksum import hash_of_all
from asyncrl.sync.tensors.shards import Shards
from asyncrl.telemetry import decisions
from asyncrl.telemetry.decisions import ClaimedGroup, TrainedVersion
from asyncrl.types import Group, Version

NORM = "train/grad_norm"


def mark_of(group: Group) -> int:
    """16 bits that differ between the groups of a task that was rolled out twice: of its tokens, their log-probs and
    versions, and its rewards."""
    state = xxhash.xxh3_64()
    columns = (group.token_ids, np.int32), (group.logprobs, np.float32), (group.versions, np.int32)
    for column, dtype in (*columns, (group.rewards, np.float32)):
        state.update(np.ascontiguousarray(column, dtype).data)
    return state.intdigest() & 0xFFFF


def weights_hash(backend: Backend) -> int:
    """The hash of this rank's part of the policy as it is now, in [0, 2^64)."""
    return hash_of_all(live_weights(backend))


def live_weights(backend: Backend) -> Shards:
    """This rank's part of the policy. It is that of later versions, too."""
    return Shards(backend.layout(), backend.local_tensors())


class VersionDecisions:
    """Records with which version the learner begins, before that is published, and the claims of the one in training.

    Does nothing where the process records no decisions.
    """

    def __init__(self, backend: Backend, version: Version, lineage: int) -> None:
        self._live = live_weights(backend) if decisions.recorded() else None
        self._claims: list[list[ClaimedGroup]] = []
        if self._live is not None:
            decisions.note("begun", version, lineage, hash_of_all(self._live))
            decisions.flush()

    def begin(self) -> None:
        self._claims = []

    def add(self, groups: Sequence[Group]) -> None:
        """Take the groups of one claim."""
        if self._live is not None:
            self._claims.append([ClaimedGroup(group.task.ordinal, mark_of(group)) for group in groups])

    def write(self, version: Version, refused: bool, values: Mapping[str, float]) -> None:
        """Record that these groups were trained on. version: that comes of it · values: metrics of the step"""
        if self._live is not None:
            weights, norm = hash_of_all(self._live), float(values.get(NORM, 0.0))
            decisions.note(*TrainedVersion(version, refused, weights, norm, self._claims).to_wire())
            decisions.flush()
