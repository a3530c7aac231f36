"""The wall clock of all Python processes of a run, which jumps. It needs no rights: they read it from a file.

JumpingClock.jump ──▸ 8 bytes of a file ──▸ clock/sitecustomize.py in each process: time.time
"""

from __future__ import annotations

import struct
from pathlib import Path

FOLDER = Path(__file__).with_name("clock")


class JumpingClock:
    """path: a file that is made anew"""

    def __init__(self, path: Path) -> None:
        self._path, self.offset_s = path, 0.0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(struct.pack("d", 0.0))

    def environment(self) -> dict[str, str]:
        """For each process of the run. PYTHONPATH is to begin with `FOLDER`."""
        return {"CHAOS_CLOCK": str(self._path)}

    def jump(self, seconds: float) -> None:
        """Forward, or back for fewer than 0."""
        self.offset_s += seconds
        with self._path.open("r+b") as file:
            file.write(struct.pack("d", self.offset_s))
