"""Parked tensors give their memory up, and come back bit for bit, views and all."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.device.parked import ParkedTensors, storages_of


def test_views_of_one_memory_are_parked_once_and_see_it_again() -> None:
    whole = torch.randn(6, 4)
    row, turned, other = whole[2], whole.t(), torch.arange(5, dtype=torch.int16)
    before = [tensor.clone() for tensor in (whole, row, turned, other)]
    storages = list(storages_of([whole, row, turned, other, torch.empty(0)]))
    assert [storage.numel() for storage in storages] == [whole.nbytes, other.nbytes]
    parked = ParkedTensors()
    parked.park(storages)
    assert (whole.untyped_storage().nbytes(), other.untyped_storage().nbytes()) == (0, 0)
    parked.park(storages)  # it is parked already
    parked.fetch()
    parked.fetch()
    assert all(torch.equal(now, then) for now, then in zip((whole, row, turned, other), before, strict=True))


def test_the_room_is_used_again() -> None:
    rooms = []

    def room(like: torch.Tensor) -> torch.Tensor:
        rooms.append(torch.empty_like(like))
        return rooms[-1]

    parked, tensor = ParkedTensors(room), torch.ones(3)
    for number in (1.0, 2.0):
        tensor.fill_(number)
        parked.park([tensor])
        parked.fetch()
        assert tensor.tolist() == [number] * 3
    assert len(rooms) == 1


def test_a_mapped_file_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(16))
    mapped = torch.from_file(str(path), shared=True, size=4)
    assert list(storages_of([mapped])) == []
