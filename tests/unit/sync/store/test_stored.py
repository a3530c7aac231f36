"""Stored versions: the format, what a reader refuses, and a writer that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from sharding import full_tensors, grid, local_tensors, same_bits, sharded_models
from stream_cases import fetch

import asyncrl.sync.store.stored as stored_module
import asyncrl.sync.store.stored_publisher as publisher_module
from asyncrl.config.schema import SyncConfig
from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.layout.layout import Box, Layout, ParamLayout, whole_layout
from asyncrl.sync.store.blobs import Bytes, FolderBlobs
from asyncrl.sync.store.stored import (
    Manifest,
    blocks,
    check_header,
    header_of,
    manifest_from_bytes,
    manifest_key,
    manifest_to_bytes,
    tensors_key,
)
from asyncrl.sync.store.stored_publisher import FAILURES, StoredPublisher
from asyncrl.sync.store.stored_subscriber import StoredSubscriber
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.tensors.shards import Shards

WAIT_S = 20.0
SHAPES = {"norm": ((8,), "bfloat16"), "embed": ((512, 1024), "float32")}
WHOLE = whole_layout(SHAPES)


# ------------------------------------------------------------------ the format


@given(box=st.tuples(st.integers(0, 3), st.lists(st.integers(1, 9), max_size=3)), most=st.integers(1, 64))
def test_blocks_tile_a_box_in_the_order_of_its_memory(box: tuple[int, list[int]], most: int) -> None:
    offset, shape = box
    held = Box(tuple(offset for _ in shape), tuple(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_module, "BLOCK_BYTES", most)
        cut = list(blocks({"w": ParamLayout(held.stops, "int16", (held,))}))
    values = torch.arange(held.elements, dtype=torch.int16).view(held.shape)
    assert [block.number for block in cut] == list(range(len(cut)))
    assert all(block.bytes <= max(most, 2) for block in cut)
    parts = [values[block.box.within(held).slices()].reshape(-1) for block in cut]
    assert torch.equal(torch.cat(parts), values.reshape(-1))
    assert [block.bytes for block in cut] == [2 * len(part) for part in parts]


def manifest(layout: Layout, **fields: object) -> Manifest:
    digests: dict[str, list[int]] = {name: [] for name in layout}
    for block in blocks(layout):
        digests[block.name].append(7)
    return replace(Manifest(1, 2, 0, 1, "full", None, 9, 8, layout, digests), **fields)  # type: ignore[arg-type]


@given(model=sharded_models(), digests=st.booleans())
def test_a_manifest_survives_the_store(model: tuple[list[Layout], Layout], digests: bool) -> None:
    one = manifest(model[1]) if digests else manifest(model[1], digests=None, kind="delta", base=1)
    assert manifest_from_bytes(manifest_to_bytes(one)) == one


@given(data=st.binary(max_size=80) | st.integers(0, 400), value=st.integers(0, 255))
def test_what_is_no_manifest_is_refused(data: bytes | int, value: int) -> None:
    whole = manifest_to_bytes(manifest(WHOLE))
    if isinstance(data, int):  # one byte of a good one is another, or its end is missing
        at = data % len(whole)
        data = whole[:at] + bytes([value]) + whole[at + 1 :] if value % 2 else whole[:at]
    try:
        found = manifest_from_bytes(data)
    except WireError:
        return
    assert isinstance(found, Manifest)
    assert found.digests is None or set(found.layout) <= set(found.digests)


def test_a_manifest_of_another_format_or_with_too_few_hashes_is_named() -> None:
    with pytest.raises(WireError, match="a manifest of format 99, this side reads 2"):
        manifest_from_bytes(msgpack.packb([99, {}]))
    with pytest.raises(WireError, match="parameter embed: not as many hashes as the 2 blocks"):
        manifest_from_bytes(manifest_to_bytes(manifest(WHOLE, digests={"embed": [1], "norm": [1]})))


def test_a_header_of_other_tensors_is_refused() -> None:
    header = header_of(WHOLE, {})
    check_header(header, WHOLE, "k")
    other = whole_layout({**SHAPES, "norm": ((8,), "float16")})
    with pytest.raises(WeightSyncError, match=r"k does not match its manifest: .*norm"):
        check_header(header, other, "k")
    with pytest.raises(WeightSyncError, match="k does not match its manifest"):
        check_header(header[:-9], WHOLE, "k")
    moved = header_of(dict(reversed(WHOLE.items())), {})  # the same tensors at other places
    with pytest.raises(WeightSyncError, match=r"k does not match its manifest: .*data_offsets"):
        check_header(moved, WHOLE, "k")


# ------------------------------------------------------------------ two ranks over a folder


class Run:
    """Two learner ranks, cut by rows, with other random bits at each version."""

    def __init__(self, folder: Path, **config: object) -> None:
        self.folder = folder
        self.config = SyncConfig(backend="file", folder=str(folder), bucket_mb=1.0, **config)  # type: ignore[arg-type]
        self.layouts = [
            {
                name: ParamLayout(
                    p.shape, p.dtype, (grid(p.shape, (2, 1))[rank],) if len(p.shape) == 2 else p.boxes
                )
                for name, p in WHOLE.items()
            }
            for rank in range(2)
        ]
        self.live = [local_tensors(layout, full_tensors(WHOLE)) for layout in self.layouts]
        self.publishers = [self.publisher(rank) for rank in range(2)]

    def publisher(self, rank: int, blobs: FolderBlobs | None = None) -> StoredPublisher:
        blobs = blobs or FolderBlobs(self.folder)
        live = Shards(self.layouts[rank], self.live[rank])
        return StoredPublisher(rank, 2, live, self.config, 1, blobs)

    def replace(self, rank: int, blobs: FolderBlobs | None = None) -> StoredPublisher:
        """A learner that was started again."""
        self.publishers[rank].close()
        self.publishers[rank] = self.publisher(rank, blobs)
        return self.publishers[rank]

    def publish(self, version: int, ranks: Iterable[int] = (0, 1)) -> None:
        for rank in ranks:
            for name, parts in local_tensors(self.layouts[rank], full_tensors(WHOLE, version)).items():
                self.live[rank][name][0].copy_(parts[0])
            self.publishers[rank].publish(version)

    def written(self, version: int) -> None:
        """Publish, and wait until both have stored it."""
        self.publish(version)
        for publisher in self.publishers:
            with publisher._changed:
                assert publisher._changed.wait_for(lambda p=publisher: p._stored == version, WAIT_S)  # type: ignore[misc]

    def stream(
        self, layout: Layout = WHOLE, blobs: FolderBlobs | None = None, lineage: int = 1
    ) -> StoredSubscriber:
        self.staging = local_tensors(layout, full_tensors(WHOLE))
        endpoints = [publisher.endpoint for publisher in self.publishers]
        blobs = blobs or FolderBlobs(self.folder)
        staging = Shards(layout, self.staging)
        return StoredSubscriber("generator-0", endpoints, staging, self.config, lineage, blobs)

    def check(self, layout: Layout, version: int) -> None:
        for name, parts in local_tensors(layout, full_tensors(WHOLE, version)).items():
            assert all(same_bits(a, b) for a, b in zip(self.staging[name], parts, strict=True))

    def file(self, rank: int, version: int, suffix: str) -> Path:
        return self.folder / f"{self.publishers[rank].endpoint}/{version:08d}.{suffix}"

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def test_each_rank_leaves_a_file_that_any_safetensors_reader_opens(run: Run) -> None:
    run.written(3)
    full = full_tensors(WHOLE, 3)
    for rank in range(2):
        with safe_open(run.file(rank, 3, "safetensors"), "pt") as file:
            assert file.metadata() == {"version": "3", "rank": str(rank)}
            assert same_bits(file.get_tensor("embed"), full["embed"][rank * 256 : rank * 256 + 256])
            assert same_bits(file.get_tensor("norm"), full["norm"])


def test_a_version_is_there_once_all_ranks_have_written_it(run: Run) -> None:
    stream = run.stream()
    assert stream.newest(-1, 0.0) is None
    run.written(0)
    run.publish(1, ranks=[0])
    assert stream.newest(-1, 0.0) == 0
    assert stream.newest(0, 0.0) is None
    run.publish(1, ranks=[1])
    assert stream.newest(0, WAIT_S) == 1


class Counting(FolderBlobs):
    bytes_read = 0

    def read(self, key: str, start: int, into: memoryview) -> None:
        self.bytes_read += len(into)
        super().read(key, start, into)


def test_of_rows_only_their_blocks_are_read_and_of_columns_whole_rows(run: Run) -> None:
    run.written(0)
    rows = {"embed": ParamLayout((512, 1024), "float32", (Box((10, 0), (20, 1024)),))}
    columns = {"embed": ParamLayout((512, 1024), "float32", (Box((10, 5), (20, 3)),))}
    headers = 2 * 4096
    for layout in (rows, columns):
        blobs = Counting(run.folder)
        staged = run.stream(layout, blobs).stage(0)
        run.check(layout, 0)
        assert staged.bytes == layout["embed"].bytes
        assert blobs.bytes_read <= stored_module.BLOCK_BYTES + headers


def test_only_the_newest_versions_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=3)
    for version in range(5):
        run.written(version)
    run.close()
    names = sorted(file.name for file in run.file(0, 0, "x").parent.iterdir())
    assert names == [f"{v:08d}.{suffix}" for v in (2, 3, 4) for suffix in ("manifest", "safetensors")]


def test_what_an_earlier_publisher_left_is_not_seen_and_goes(run: Run) -> None:
    run.written(7)
    left = run.file(0, 7, "manifest")
    run.replace(0)
    assert run.stream().newest(-1, 0.0) is None
    run.replace(1)
    run.written(2)
    assert run.stream().newest(-1, 0.0) == 2
    assert not left.parent.exists()


def test_a_version_deleted_under_the_reader_makes_it_start_over(run: Run) -> None:
    run.written(0)
    stream = run.stream()
    assert stream.newest(-1, 0.0) == 0
    run.file(1, 0, "manifest").unlink()
    run.file(1, 0, "safetensors").unlink()
    with pytest.raises(SnapshotEvictedError, match="generator-0: version 0 was deleted"):
        stream.stage(0)
    run.written(1)
    staged = fetch(stream, -1, WAIT_S)
    assert staged is not None
    assert staged.version == 1
    run.check(WHOLE, 1)


def test_tensors_deleted_between_manifest_and_read_make_it_start_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.written(0)
    stream = run.stream()

    def gone(key: str, start: int, into: memoryview) -> None:
        for suffix in ("manifest", "safetensors"):
            run.file(0, 0, suffix).unlink(missing_ok=True)
        FolderBlobs(run.folder).read(key, start, into)

    monkeypatch.setattr(stream._blobs, "read", gone)
    with pytest.raises(SnapshotEvictedError, match="version 0 was deleted"):
        stream.stage(0)


def spoil(path: Path, change: Callable[[bytearray], bytearray | bytes]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flipped(at: int) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        data[at] ^= 1
        return data

    return change


@pytest.mark.parametrize(
    ("suffix", "change", "says"),
    [
        ("safetensors", lambda data: data[:-1], r"is torn: \d+ bytes, not the \d+ it should have"),
        ("safetensors", lambda data: data[:4], r"is torn: 4 bytes"),
        ("safetensors", flipped(-1), r"is damaged: parameter embed, Box\(offsets=\(256, 0\)"),
        ("safetensors", flipped(8), "does not match its manifest"),
        ("manifest", lambda data: data[:100], "not a manifest"),
        ("manifest", lambda data: b"hello", "not a manifest"),
        (
            "manifest",
            lambda data: manifest_to_bytes(manifest(WHOLE, version=0, rank=1, world=3)),
            "foreign: .* rank 1 of 3",
        ),
        (
            "manifest",
            lambda data: manifest_to_bytes(manifest(WHOLE, version=5, rank=1, world=2)),
            "foreign: of version 5",
        ),
        (
            "manifest",
            lambda data: manifest_to_bytes(manifest(WHOLE, version=0, rank=1, world=2, lineage=9)),
            "lineage 9",
        ),
        (
            "manifest",
            lambda data: manifest_to_bytes(
                manifest(WHOLE, version=0, rank=1, world=2, kind="wavelet", base=3)
            ),
            "of kind 'wavelet', which",
        ),
    ],
)
def test_what_is_torn_damaged_or_foreign_is_refused_by_name(
    suffix: str, change: Callable[[bytearray], bytearray | bytes], says: str, run: Run
) -> None:
    run.written(0)
    spoil(run.file(1, 0, suffix), change)
    with pytest.raises(WeightSyncError, match=says) as refusal:
        run.stream().stage(0)
    assert not isinstance(refusal.value, SnapshotEvictedError)
    assert run.publishers[1].endpoint in str(refusal.value)


def test_missing_tensors_beside_a_manifest_are_an_error(run: Run) -> None:
    run.written(0)
    run.file(0, 0, "safetensors").unlink()
    with pytest.raises(
        WeightSyncError, match=r"there is no rank-00000/.*, though its manifest is there"
    ) as refusal:
        run.stream().stage(0)
    assert not isinstance(refusal.value, SnapshotEvictedError)


def test_without_verify_nothing_is_hashed(tmp_path: Path) -> None:
    run = Run(tmp_path, verify=False)
    run.written(0)
    staged = run.stream().stage(0)
    run.check(WHOLE, 0)
    assert staged.checksum is None
    run.close()


# ------------------------------------------------------------------ a writer that nobody waits for


class Slow(FolderBlobs):
    """Holds each put back until `go_on`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.keys: list[str] = []

    def put(self, key: str, parts: Iterable[Bytes]) -> None:
        self.keys.append(key)
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        super().put(key, parts)


def test_the_learner_goes_on_while_a_version_is_written_and_the_next_is_the_newest(run: Run) -> None:
    slow = Slow(run.folder)
    publisher = run.replace(0, slow)
    run.publish(0, ranks=[0])
    assert slow.entered.wait(WAIT_S)
    for version in (1, 2, 3):
        run.publish(version, ranks=[0])
    slow.go_on.set()
    publisher.close(WAIT_S)
    assert slow.keys == [key(publisher.endpoint, v) for v in (0, 3) for key in (tensors_key, manifest_key)]
    with safe_open(run.file(0, 0, "safetensors"), "pt") as file:
        assert same_bits(file.get_tensor("embed"), full_tensors(WHOLE, 0)["embed"][:256]), "as at version 0"
    stats, size = publisher.stats(), run.file(0, 3, "safetensors").stat().st_size
    assert (stats["stored"], stats["bytes"], stats["failures"]) == (2, 2 * size, 0)


class Failing(FolderBlobs):
    """Every put fails while `broken`."""

    broken = True

    def put(self, key: str, parts: Iterable[Bytes]) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        super().put(key, parts)


def test_a_failed_write_is_tried_again_and_many_in_a_row_reach_the_learner(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.001)
    failing = Failing(run.folder)
    publisher = run.replace(0, failing)
    run.publish(0, ranks=[0])
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: publisher._failed >= FAILURES, WAIT_S)
    with pytest.raises(
        WeightSyncError, match=r"learner rank 0: \d+ times in a row .* No space left on device"
    ):
        publisher.publish(1)
    failing.broken = False
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: publisher._stored == 0, WAIT_S)
    run.publish(1, ranks=[0])
    publisher.close(WAIT_S)
    assert publisher._stored == 1


def test_closing_ends_a_write_in_the_middle_and_leaves_no_part_of_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    digest = publisher_module.row_digest

    def slow_digest(*what: object) -> int:
        begun.set()
        assert go_on.wait(WAIT_S)
        return digest(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(publisher_module, "row_digest", slow_digest)
    publisher = run.replace(0)
    run.publish(0, ranks=[0])
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=publisher.close)
    closing.start()
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: publisher._closing, WAIT_S)
    go_on.set()
    closing.join(WAIT_S)
    publisher._thread.join(WAIT_S)
    assert list(run.file(0, 0, "x").parent.iterdir()) == []
