"""Progress of work that takes long, on stderr: a bar on a terminal, lines or nothing elsewhere."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

AFTER_S = 1.0
"""Shorter work has no bar."""

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.5

Thing = TypeVar("Thing")


def bars_wanted() -> bool:
    """Whether stderr is a terminal, and this the first rank of its process."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


def tracked(
    things: Sequence[Thing],
    what: str,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Thing]:
    """Yield the things, with a bar that appears after `AFTER_S` and disappears at the end.

    console: None: stderr, if bars are wanted.
    """
    if console is None and not bars_wanted():
        yield from things
        return
    from rich.console import Console
    from rich.progress import Progress

    began = clock()
    progress = Progress(console=console or Console(stderr=True), transient=True)
    bar = progress.add_task(what, total=len(things))
    try:
        for done, thing in enumerate(things, start=1):
            yield thing
            progress.update(bar, completed=done)
            if clock() - began >= AFTER_S:
                progress.start()
    finally:
        if progress.live.is_started:
            progress.stop()


async def tracked_work(
    work: Awaitable[Thing],
    what: str,
    done: Callable[[], int],
    total: int | None,
) -> Thing:
    """Await `work`, and show how much of it is done.

    total: things to do; None: it is not known
    """
    task = asyncio.ensure_future(work)
    seconds = BAR_EVERY_S if bars_wanted() else LINE_EVERY_S
    try:
        with _shower(what, total) as show:
            while not (await asyncio.wait([task], timeout=seconds))[0]:
                show(done())
        return task.result()
    finally:
        task.cancel()


@contextmanager
def _shower(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    if not bars_wanted():
        began, ending = time.monotonic(), "" if total is None else f" of {total}"
        yield lambda done: print(
            f"{what}: {done}{ending} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True
        )
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda done: progress.update(bar, completed=done)
