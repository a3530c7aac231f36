"""A disk for what a queue keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_faults import Disk


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Empty. Its power may fail."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = Disk(folder, monkeypatch)
    yield made
    made.close()
