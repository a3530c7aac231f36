"""Notebook cells without a notebook: their source is where IPython keeps it, and no file has it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

NAME = "cells_of_a_session"


@contextmanager
def session(*cells: str) -> Iterator[ModuleType]:
    """A module without a file in which these cells were run, one after another."""
    module, files = ModuleType(NAME), [f"/tmp/ipykernel_1/{number}.py" for number in range(len(cells))]
    sys.modules[NAME] = module
    try:
        for file, cell in zip(files, cells, strict=True):
            linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
            exec(compile(cell, file, "exec"), module.__dict__)
        yield module
    finally:
        del sys.modules[NAME]
        for file in files:
            linecache.cache.pop(file, None)
