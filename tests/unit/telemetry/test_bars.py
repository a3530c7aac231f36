"""Progress bars appear on a terminal, for what takes long, and nowhere else."""

from __future__ import annotations

import asyncio
import io
from itertools import count

import pytest
from rich.console import Console

from asyncrl.telemetry import bars
from asyncrl.telemetry.bars import tracked, tracked_work


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


async def test_without_a_terminal_long_work_has_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "LINE_EVERY_S", 0.001)
    looks, enough = count(), asyncio.Event()

    async def work() -> str:
        await enough.wait()
        return "the answer"

    def done() -> int:
        look = next(looks)
        if look == 2:
            enough.set()
        return look

    assert await tracked_work(work(), "answers", done, 3) == "the answer"
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines[:3]] == [f"answers: {n} of 3" for n in range(3)]


async def test_work_that_fails_or_is_cancelled_ends_its_progress() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await tracked_work(fails(), "answers", int, None)
    endless = asyncio.get_running_loop().create_future()
    shown = asyncio.ensure_future(tracked_work(endless, "answers", int, None))
    await asyncio.sleep(0)
    shown.cancel()
    await asyncio.gather(shown, return_exceptions=True)
    assert endless.cancelled()
