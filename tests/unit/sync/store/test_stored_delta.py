"""Versions stored as changes: what is on disk, who reads how much of it, and what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_cases import DRIFTING, links_have, stepped
from pretended_gpu import PretendedGpu
from processes import until
from sharding import full_tensors, local_tensors, same_bits
from stream_cases import by_rows

import asyncrl.sync.store.stored_publisher as stored_publisher
from asyncrl.config.schema import SyncConfig
from asyncrl.errors import WeightSyncError
from asyncrl.sync.delta.delta import Changes
from asyncrl.sync.delta.device_delta import Pair
from asyncrl.sync.delta.records import HEADER_BYTES
from asyncrl.sync.layout.layout import Box, Layout, ParamLayout, layout_bytes, whole_layout
from asyncrl.sync.store.blobs import FolderBlobs
from asyncrl.sync.store.stored import ENTRY_BYTES, blocks, record_hash
from asyncrl.sync.store.stored_publisher import FULL_EVERY, Chain, StoredPublisher
from asyncrl.sync.store.stored_subscriber import StoredSubscriber
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.sync.tensors.shards import Shards

WHOLE = whole_layout({**DRIFTING, "large": ((1200, 500), "bfloat16")})  # of several blocks
COLUMNS = {
    name: ParamLayout(p.shape, p.dtype, (Box((0,) * (len(p.shape) - 1) + (7,), (*p.shape[:-1], 40)),))
    for name, p in WHOLE.items()
}
WORLD = 2


class Store:
    """The publishers of a learner that drifts, and streams that read what they store."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.config = SyncConfig(
            backend="file", folder=str(folder), bucket_mb=0.25, delta="always", keep=2, deadline_s=20.0
        )
        self.full = [full_tensors(WHOLE)]
        layouts = [by_rows({n: (p.shape, p.dtype) for n, p in WHOLE.items()}, r, WORLD) for r in range(WORLD)]
        self.live = [local_tensors(layout, self.full[0]) for layout in layouts]
        self.layouts = layouts
        self.publishers = [
            StoredPublisher(rank, WORLD, Shards(layout, live), self.config, 1, FolderBlobs(folder))
            for rank, (layout, live) in enumerate(zip(layouts, self.live, strict=True))
        ]
        for publisher in self.publishers:
            stack.callback(publisher.close)

    def publish(self, version: int) -> None:
        """Returns when it is stored."""
        while len(self.full) <= version:
            self.full.append(stepped(self.full[-1], 0.02, len(self.full)))
        for publisher, layout, live in zip(self.publishers, self.layouts, self.live, strict=True):
            for name, parts in local_tensors(layout, self.full[version]).items():
                for mine, new in zip(live[name], parts, strict=True):
                    mine.copy_(new)
            publisher.publish(version)
        assert self.reader("waits", WHOLE).stream.newest(version - 1, 20.0) == version

    def reader(self, who: str, layout: Layout) -> Reader:
        return Reader(self, who, layout, self._stack)

    def files(self, suffix: str) -> list[int]:
        """The versions that rank 0 has stored as that."""
        (series,) = (self.folder / "rank-00000").iterdir()
        return sorted(int(file.stem) for file in series.glob(f"*.{suffix}"))


class Reader:
    def __init__(self, store: Store, who: str, layout: Layout, stack: ExitStack) -> None:
        self.store, self.layout = store, layout
        self.staging = local_tensors(layout, {name: torch.zeros_like(t) for name, t in store.full[0].items()})
        endpoints = [publisher.endpoint for publisher in store.publishers]
        self.stream = StoredSubscriber(
            who, endpoints, Shards(layout, self.staging), store.config, 1, FolderBlobs(store.folder)
        )
        stack.callback(self.stream.close)

    def take(self, version: int) -> StagedWeights:
        staged = self.stream.stage(version)
        for name, expected in local_tensors(self.layout, self.store.full[version]).items():
            assert all(map(same_bits, self.staging[name], expected)), name
        assert staged.checksum is not None
        assert staged.checksum.holds(Shards(self.layout, self.staging))
        return staged


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with ExitStack() as stack:
        yield Store(tmp_path / "weights", stack)


@pytest.mark.parametrize("layout", [WHOLE, COLUMNS])
def test_who_keeps_up_reads_changes_and_who_joins_reads_from_the_full_version_on(
    store: Store, layout: Layout
) -> None:
    steady, laggard = store.reader("steady", layout), store.reader("laggard", layout)
    full = layout_bytes(layout)
    for version in range(5):
        store.publish(version)
        staged = steady.take(version)
        # Of blocks that are cut along columns the whole record is read.
        assert staged.bytes == full if version == 0 else 0 < staged.bytes < 0.2 * layout_bytes(WHOLE)
        if version == 1:
            laggard.take(1)
    assert laggard.take(4).bytes < 0.5 * layout_bytes(WHOLE)
    assert full < store.reader("joiner", layout).take(4).bytes < full + 0.5 * layout_bytes(WHOLE)
    assert (store.files("safetensors"), store.files("delta")) == ([0], [1, 2, 3, 4])


def test_now_and_then_all_is_stored_and_what_nobody_needs_is_deleted(store: Store) -> None:
    for version in range(FULL_EVERY + 2):
        store.publish(version)
    # A version is there before older ones are deleted: with keep=2 the chain before it can go.
    left = ([FULL_EVERY], [FULL_EVERY + 1], [FULL_EVERY, FULL_EVERY + 1])
    until(
        lambda: tuple(map(store.files, ("safetensors", "delta", "manifest"))) == left,
        "that the chain is deleted",
    )
    store.reader("joiner", WHOLE).take(FULL_EVERY + 1)


def test_by_hand() -> None:
    """Four versions of 100 bytes: the third would make the chain longer than a full one."""
    chain = Chain(100)
    assert not chain.goes_on
    chain.add_full(3)
    chain.add_delta(4, 60)
    assert chain.goes_on
    chain.add_delta(6, 60)
    assert not chain.goes_on
    chain.add_full(7)
    assert chain.goes_on
    assert [chain.first_needed(version) for version in (3, 4, 6, 7)] == [3, 3, 3, 7]


def test_a_staging_memory_that_was_written_to_is_read_anew(store: Store) -> None:
    reader = store.reader("generator-0", COLUMNS)
    for version in (0, 1):
        store.publish(version)
        reader.take(version)
    reader.staging["large"][0].view(torch.uint8)[700, 5] ^= 1
    store.publish(2)
    assert reader.take(2).bytes > layout_bytes(COLUMNS)


@pytest.mark.parametrize(
    ("at", "what"), [(3, "in a blob of"), (9, "another hash"), (-5, "another hash"), (None, "is torn")]
)
def test_a_damaged_delta_is_named_and_the_next_full_version_is_good(
    store: Store, at: int | None, what: str
) -> None:
    reader = store.reader("generator-0", WHOLE)
    store.publish(0)
    reader.take(0)
    store.publish(1)
    (file,) = (store.folder / "rank-00001").glob("*/00000001.delta")
    data = bytearray(file.read_bytes())
    if at is not None:
        data[at] ^= 1
    file.write_bytes(data if at is not None else data[:-8])
    with pytest.raises(WeightSyncError, match=f"00000001.delta at .*{what}"):
        reader.stream.stage(1)
    for version in range(2, FULL_EVERY + 1):
        store.publish(version)
    reader.take(FULL_EVERY)


def test_records_that_begin_between_multiples_of_8_are_refused(store: Store) -> None:
    """The second begins 4 bytes late: as long as before together, and with the right hashes."""
    reader = store.reader("generator-0", WHOLE)
    store.publish(0)
    reader.take(0)
    store.publish(1)
    (file,) = (store.folder / "rank-00000").glob("*/00000001.delta")
    data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    table = data[: ENTRY_BYTES * len(list(blocks(store.layouts[0])))].view(torch.int64).view(-1, 2)
    sizes = [int(table[0, 0]) + 4, int(table[1, 0]) - 4]
    first, second, _ = data[table.nbytes :].split([*sizes, data.numel() - table.nbytes - sum(sizes)])
    table[:2, 0] = torch.tensor(sizes)
    table[:2, 1] = torch.tensor([record_hash(first), record_hash(second)])
    file.write_bytes(data.numpy().tobytes())
    with pytest.raises(WeightSyncError, match="or one that is too long"):
        reader.stream.stage(1)


def test_wrong_changes_with_a_right_checksum_are_found_by_the_hash_of_the_version(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = store.reader("generator-0", WHOLE)
    store.publish(0)
    reader.take(0)

    def wrong(pairs: Sequence[Pair]) -> list[Changes]:
        ((old, new),) = pairs
        changed = new.clone()
        changed.view(-1).view(torch.uint8)[0] ^= 1
        return find([(old, changed)])

    find = stored_publisher.all_changes
    monkeypatch.setattr(stored_publisher, "all_changes", wrong)
    store.publish(1)
    with pytest.raises(WeightSyncError, match="is not what learner rank 0 has"):
        reader.stream.stage(1)


@pytest.mark.parametrize(
    ("form", "deltas"), [("whole", []), ("changes", ["plain"]), ("deflated", ["deflated"])]
)
def test_auto_stores_changes_where_the_store_is_slow_and_deflates_them_where_it_is_very_slow(
    form: str, deltas: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, begun = links_have(form, monkeypatch), time.monotonic()
    layout = whole_layout(DRIFTING)
    live = full_tensors(layout)
    staging = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    config = SyncConfig(backend="file", folder=str(tmp_path), deadline_s=20.0)
    publisher = StoredPublisher(0, 1, Shards(layout, live), config, 1, FolderBlobs(tmp_path))
    try:
        stream = StoredSubscriber(
            "g", [publisher.endpoint], Shards(layout, staging), config, 1, FolderBlobs(tmp_path)
        )
        for version in (0, 1):
            publisher.publish(version)
            assert stream.newest(version - 1, 20.0) == version
            stream.stage(version)
            assert all(same_bits(staging[name], live[name]) for name in layout)
            for name, tensor in stepped(live, 0.02, seed=1).items():
                live[name].copy_(tensor)
        (series,) = (tmp_path / "rank-00000").iterdir()
        assert [of_records(file) for file in series.glob("*.delta")] == deltas
        blobs = [file.stat().st_size for file in sorted(series.glob("*.safetensors"))]
        assert [size for size, _ in measured] == blobs
        assert all(0 < seconds < time.monotonic() - begun for _, seconds in measured)
    finally:
        publisher.close()


def of_records(delta: Path) -> str:
    """Whether the first record of a stored delta is deflated."""
    first = torch.frombuffer(bytearray(delta.read_bytes()[ENTRY_BYTES * len(DRIFTING) :]), dtype=torch.uint8)
    gaps, _, _, gaps_deflated, _ = first[:HEADER_BYTES].view(torch.int64).tolist()
    return "deflated" if 0 < gaps_deflated < gaps else "plain"


def test_the_trace_has_what_each_version_took_in_the_store(tmp_path: Path, trace: Any) -> None:
    layout = whole_layout(DRIFTING)
    full = full_tensors(layout)
    config = SyncConfig(backend="file", folder=str(tmp_path / "store"), deadline_s=20.0)
    publisher = StoredPublisher(0, 1, Shards(layout, full), config, 1, FolderBlobs(tmp_path / "store"))
    publisher.publish(0)
    publisher.close(20.0)
    (span,) = [span for span in trace().lanes["weights"].spans if span.name == "store"]
    assert span.about == {"version": 0, "bytes": publisher.stats()["bytes"]}
    assert span.about["bytes"] > sum(tensor.nbytes for parts in full.values() for tensor in parts)


def test_a_gpu_reads_versions_and_changes(store: Store) -> None:
    with PretendedGpu() as gpu:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in store.full[0].items()}
        staging = {
            name: [gpu.tensor(part) for part in parts]
            for name, parts in local_tensors(COLUMNS, zeros).items()
        }
        endpoints = [publisher.endpoint for publisher in store.publishers]
        blobs = FolderBlobs(store.folder)
        stream = StoredSubscriber("gpu", endpoints, Shards(COLUMNS, staging), store.config, 1, blobs)
        for version in (1, 2):
            store.publish(version)
            staged = stream.stage(version)
            for name, expected in local_tensors(COLUMNS, store.full[version]).items():
                assert all(
                    same_bits(part.memory, of) for part, of in zip(staging[name], expected, strict=True)
                )
            assert staged.checksum is not None
        stream.close()
    assert store.files("delta") == [2]
