"""The learner's decisions are in the file before anything comes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decided_groups import group
from learner_fakes import FakeBackend
from trainer_cases import checkpoints_of

from asyncrl.learner.checkpoint import Meta
from asyncrl.learner.reporting.version_decisions import VersionDecisions, mark_of
from asyncrl.sync.tensors.shards import layout_of
from asyncrl.telemetry import decisions
from asyncrl.telemetry.decisions import ClaimedGroup, TrainedVersion, read_lives


class Learner(FakeBackend):
    """Has one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(4)

    def layout(self) -> Any:
        return layout_of({"w": self.weight})

    def local_tensors(self) -> Any:
        return {"w": self.weight}

    def save(self, folder: Path) -> None:
        folder.mkdir()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    about = {"format": decisions.FORMAT, "role": "learner", "config": "config.yaml"}
    with decisions.recording(tmp_path / "decisions", "learner", about):
        yield tmp_path / "decisions"


def items(folder: Path) -> list[tuple[Any, ...]]:
    """Those that a kill now would leave."""
    return list(read_lives(folder)[0].items)


def test_a_beginning_is_there_before_the_version_is_published(folder: Path) -> None:
    backend: Any = Learner()
    VersionDecisions(backend, 4, 2)
    (begun,) = items(folder)
    assert begun[:3] == ("begun", 4, 2)


def test_a_version_is_there_with_its_claims_before_it_is_published(folder: Path) -> None:
    backend: Any = Learner()
    decided = VersionDecisions(backend, 4, 2)
    for claims in ([group(1), group(2)], [group(5)]):
        decided.begin()
        decided.add(claims)
        decided.add([])
        backend.weight += 1
        decided.write(5, False, {"train/grad_norm": 0.5})
    begun, *steps = items(folder)
    first, second = map(TrainedVersion.from_wire, steps)
    assert len({begun[3], first.weights, second.weights}) == 3
    assert first.claims == [[ClaimedGroup(n, mark_of(group(n))) for n in (1, 2)], []]
    assert (second.version, second.refused, second.norm) == (5, False, 0.5)


def test_a_checkpoint_is_there_before_another_learner_can_begin_from_it(folder: Path, tmp_path: Path) -> None:
    backend: Any = Learner()
    checkpoints_of(tmp_path, backend, asynchronous=False).begin(Meta(6, b"", b""))
    assert items(folder) == [("saved", 6)]


def test_without_a_recording_no_weight_is_looked_at() -> None:
    nothing: Any = None
    decided = VersionDecisions(nothing, 4, 2)
    decided.add([group(1)])
    decided.write(5, False, {})
