"""Saves of several ranks whose plans travel in msgpack: the files are those of torch's own save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from asyncrl.learner.backends import joint_save
from asyncrl.learner.backends.checkpoint_reader import read_metadata
from asyncrl.learner.backends.storage import Boxes
from asyncrl.learner.ranks import process_group
from asyncrl.sync.layout.layout import Box

STATE = {
    "policy.a": torch.arange(6.0).reshape(2, 3),
    "policy.b": torch.ones(2, dtype=torch.bfloat16),
    "step": torch.tensor(3.0),
    "boxes": Boxes(
        (4, 2), [(Box((0, 0), (1, 2)), torch.ones(1, 2)), (Box((1, 0), (3, 2)), torch.zeros(3, 2))]
    ),
}


def test_one_rank_writes_what_torch_writes(tmp_path: Path) -> None:
    dcp.save(dict(STATE), checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    joint_save.save_jointly(STATE, dcp.FileSystemWriter(tmp_path / "ours"))
    theirs, ours = read_metadata(tmp_path / "theirs"), read_metadata(tmp_path / "ours")
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    shards = [(tmp_path / who / "__0_0.distcp").read_bytes() for who in ("ours", "theirs")]
    assert shards[0] == shards[1]


@pytest.mark.parametrize("place", range(4))
def test_a_failure_of_another_rank_is_an_error_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """At each of the four exchanges: the plan, the shares, the tensors, the metadata."""
    alone, calls = process_group.exchange, []

    def exchange(value: Any, group: Any = None) -> list[Any]:
        calls.append(value)
        return [*alone(value, group), *([[False, None]] if len(calls) == place + 1 else [])]

    monkeypatch.setattr(process_group, "exchange", exchange)
    with pytest.raises(OSError, match="another rank could not write its part"):
        joint_save.save_jointly(STATE, dcp.FileSystemWriter(tmp_path))
    assert len(calls) == place + 1


@pytest.mark.parametrize("name", ["write_data", "finish"])
def test_a_failure_here_is_told_to_the_others_and_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    alone, told = process_group.exchange, []

    def exchange(value: Any, group: Any = None) -> list[Any]:
        told.append(value[0])
        return alone(value, group)

    def full(*_: Any, **__: Any) -> Callable[..., Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process_group, "exchange", exchange)
    monkeypatch.setattr(dcp.FileSystemWriter, name, full)
    with pytest.raises(OSError, match="No space left"):
        joint_save.save_jointly(STATE, dcp.FileSystemWriter(tmp_path))
    assert told[-1] is False
