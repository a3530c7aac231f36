"""torch.profiler over the versions of `learner.profile_versions`: RUN/profile/learner-rank-R.v000005-v000007.json.gz"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asyncrl.types import Version

log = logging.getLogger(__name__)

FOLDER = "profile"


class ProfileWindow:
    """One rank's; used by the thread that trains. A profiler that fails is named, and used no more.

    versions: the first and the last one, which are published at the end of their steps; None: none
    """

    def __init__(self, run_folder: Path, versions: tuple[Version, ...] | None, rank: int) -> None:
        self._file = run_folder / FOLDER / f"learner-rank-{rank}"
        self._first, self._last = versions or (1, 0)
        self._begun_at = self._at = 0
        self._profiler: Any = None

    def begin(self, version: Version) -> None:
        """The step to this version begins."""
        if version > self._last:
            self.close()
        elif self._profiler is None and version >= self._first:
            self._begun_at = version
            self._guarded(self._start)
        self._at = version

    def close(self) -> None:
        """End the profile, if one is under way, and write it."""
        if self._profiler is not None:
            self._guarded(self._write)
            self._profiler = None

    def _start(self) -> None:
        profiler = torch.profiler.profile()  # of the CPU, and of a GPU that is there
        profiler.start()
        self._profiler = profiler

    def _write(self) -> None:
        self._profiler.stop()
        self._file.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(f"{self._file}.v{self._begun_at:06}-v{self._at:06}.json.gz")

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._first, self._last = 1, 0
            log.warning("torch.profiler fails, the run goes on without a profile: %s", error)
