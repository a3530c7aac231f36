"""Checkpoints of other people are data: nothing that they contain is run."""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251  # to write what must not be read
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from learner_cases import copied_weights, same, small_config, tiny_model
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends import storage
from asyncrl.learner.backends.checkpoint_reader import FILE, read_metadata
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend

NUMBERS = {"policy.a": torch.arange(6.0).reshape(2, 3), "policy.b": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(dict(NUMBERS), checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    return tmp_path / "saved"


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def changed(folder: Path, change: Callable[[Metadata], Any]) -> None:
    metadata = pickle.loads((folder / FILE).read_bytes())
    (folder / FILE).write_bytes(pickle.dumps(change(metadata)))


def test_the_records_are_those_of_torch(saved: Path) -> None:
    ours, theirs = read_metadata(saved), dcp.FileSystemReader(saved).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    state = {name: torch.zeros_like(tensor) for name, tensor in NUMBERS.items()}
    storage.load_state(saved, state)
    for name, tensor in NUMBERS.items():
        assert torch.equal(state[name], tensor)


@pytest.mark.parametrize("where", ["alone", "planner_data", "tensors", "places", "path"])
def test_code_in_the_metadata_is_not_run(saved: Path, tmp_path: Path, where: str) -> None:
    def poisoned(metadata: Metadata) -> Any:
        runs: Any = Runs(tmp_path / "ran")
        if where == "alone":
            return runs
        if where == "planner_data":
            metadata.planner_data = runs
        elif where == "tensors":
            metadata.state_dict_metadata["policy.a"] = runs
        elif where == "places":
            metadata.storage_data = {MetadataIndex("policy.a"): runs}
        else:
            assert metadata.storage_meta is not None
            metadata.storage_meta.checkpoint_id = runs
        return metadata

    changed(saved, poisoned)
    with pytest.raises(
        ConfigError, match=r"^run.resume = .*\.metadata of this checkpoint is not .*names (posix|nt)\.mkdir"
    ):
        storage.models_in(saved)
    with pytest.raises(ConfigError):
        storage.load_state(saved, {"policy.a": torch.zeros(2, 3)})
    assert not (tmp_path / "ran").exists()


def test_a_tensor_that_is_declared_to_be_bytes_is_not_unpickled(saved: Path, tmp_path: Path) -> None:
    """torch loads bytes without `weights_only`."""
    payload = io.BytesIO()
    torch.save(Runs(tmp_path / "ran"), payload)
    (saved / "__0_0.distcp").write_bytes(payload.getvalue())

    def as_bytes(metadata: Metadata) -> Metadata:
        metadata.state_dict_metadata["policy.a"] = BytesStorageMetadata()
        place = metadata.storage_data[MetadataIndex("policy.a", [0, 0])]
        place.offset, place.length = 0, len(payload.getvalue())
        metadata.storage_data = {MetadataIndex("policy.a"): place}
        return metadata

    changed(saved, as_bytes)
    with pytest.raises(ConfigError, match=r"names .*BytesStorageMetadata"):
        storage.load_state(saved, {"policy.a": torch.zeros(2, 3)})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["../../../etc/passwd", "/etc/passwd", "__0_0.distcp/../../passwd"])
def test_files_beside_the_checkpoint_are_not_read(saved: Path, file: str) -> None:
    def elsewhere(metadata: Metadata) -> Metadata:
        for place in metadata.storage_data.values():
            place.relative_path = file
        return metadata

    changed(saved, elsewhere)
    with pytest.raises(ConfigError, match=rf"it places a tensor in '{file}'"):
        storage.models_in(saved)


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("place", "offset", "0"),
        ("place", "length", 1.0),
        ("tensor", "size", [2, 3]),
        ("tensor", "chunks", ()),
    ],
)
def test_a_field_of_another_type_is_refused(saved: Path, where: str, field: str, value: Any) -> None:
    def mistyped(metadata: Metadata) -> Metadata:
        records = metadata.storage_data if where == "place" else metadata.state_dict_metadata
        for record in records.values():
            setattr(record, field, value)
        return metadata

    changed(saved, mistyped)
    with pytest.raises(ConfigError, match=f"it has a {type(value).__name__} in place of a "):
        storage.models_in(saved)


def test_metadata_that_is_cut_or_of_another_kind_is_refused(saved: Path) -> None:
    whole = (saved / FILE).read_bytes()
    for spoiled in (
        b"",
        whole[:-1],
        whole[: len(whole) // 2],
        b"\x80\x04K\x01.",
        pickle.dumps(MetadataIndex("a")),
    ):
        (saved / FILE).write_bytes(spoiled)
        with pytest.raises(ConfigError, match=r"^run\.resume = "):
            storage.models_in(saved)


def test_a_pickle_cannot_change_torchs_records(saved: Path) -> None:
    """BUILD sets attributes of whatever lies on the stack, classes too."""
    module, before = "torch.distributed.checkpoint.metadata", vars(Metadata).copy()
    attack = b"\x80\x02c" + module.encode() + b"\nMetadata\nN}U\x05stateK\x01s\x86b."
    (saved / FILE).write_bytes(attack)
    with pytest.raises(ConfigError):
        storage.models_in(saved)
    assert vars(Metadata).copy() == before


def test_a_backend_loads_what_torch_alone_wrote(tmp_path: Path) -> None:
    """As every checkpoint was before."""
    config: Config = small_config(tmp_path)
    tiny_model(Path(config.model.path))
    one, other = FsdpBackend(config), FsdpBackend(config)
    with torch.no_grad():
        for tensor in one.local_tensors().values():
            tensor.add_(1.0)
    dcp.save(one._state(), checkpoint_id=str(tmp_path / "old"), no_dist=True)
    assert not same(copied_weights(one), copied_weights(other))
    other.load(tmp_path / "old")
    assert same(copied_weights(one), copied_weights(other))
