"""python -m bench.gpu: see the package."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.gpu import packages


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="packages-") as folder:
        packages.provide(packages.requirements(), packages.WHEELS, Path(folder))
        from bench.gpu.page import main as checked  # imports what was provided

        return checked()


if __name__ == "__main__":
    sys.exit(main())
