"""Output whose reader has gone."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import TextIO

import pytest
from rich.console import Console

from asyncrl.launch.views.output import LastingOutput, lasting_output


def without_reader(kind: str) -> TextIO:
    """The writing end of a pipe, or a terminal, that nobody reads any more."""
    reading, writing = os.pipe() if kind == "pipe" else pty.openpty()
    os.close(reading)
    return os.fdopen(writing, "w")


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_lost_reader_is_no_error(kind: str) -> None:
    with without_reader(kind) as stream:
        output = LastingOutput(stream)
        for _ in range(2):
            assert output.write("version 1\n" * 10_000) > 0
            output.flush()


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_console_goes_on_without_its_reader(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_reader(kind) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with lasting_output():
            Console().print("version 1")
            print("version 2", flush=True)


def test_a_full_disk_stays_an_error() -> None:
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w") as stream:
        LastingOutput(stream).write("version 1\n" * 10_000)


def test_a_process_ends_well_after_its_reader_has_gone() -> None:
    """Also when the interpreter flushes what is left."""
    code = "from asyncrl.launch.views.output import lasting_output\nwith lasting_output(): print('version 1')"
    with without_reader("pipe") as stream:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=stream, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, "")
