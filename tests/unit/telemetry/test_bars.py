"""Progress bars appear on a terminal, for what takes long, and nowhere else."""

from __future__ import annotations

import io
from itertools import count

import pytest
from rich.console import Console

from asyncrl.telemetry.bars import tracked


def drawn(seconds_each: float) -> tuple[list[int], str]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    ticks = count()
    things = list(tracked([1, 2, 3], "reading weights", console, lambda: next(ticks) * seconds_each))
    return things, out.getvalue()


def test_what_takes_long_has_a_bar() -> None:
    things, screen = drawn(seconds_each=2.0)
    assert things == [1, 2, 3]
    assert "reading weights" in screen


def test_what_is_done_soon_has_none() -> None:
    things, screen = drawn(seconds_each=0.1)
    assert things == [1, 2, 3]
    assert screen == ""


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = count()
    assert list(tracked([1, 2], "reading weights", clock=lambda: next(ticks) * 5.0)) == [1, 2]
    assert capsys.readouterr() == ("", "")
