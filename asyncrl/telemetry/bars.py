"""Progress bars for what takes long, on a terminal only: a log keeps lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

AFTER_S = 1.0
"""What is done sooner has no bar."""

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
    """The things one by one, with a bar that begins once they take longer than `AFTER_S` and is gone at the end.

    Args:
        things: what is worked on while this generator waits.
        what: the label of the bar.
        console: where it is drawn; stderr unless given, and there only if bars are wanted.
        clock: seconds.
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
