"""Blocks of README and of the pages in docs/, for tests that check or run them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path

from processes import ran

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"# (\S+\.(?:py|yaml))\n")
"""The first line of a block that a reader saves as a file."""


def text_of(page: str) -> str:
    """The text of a page, named by its path in the repository."""
    return (ROOT / page).read_text("utf-8")


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of these languages, in the order of the page."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def follow(page: str, replaced: Mapping[str, str]) -> list[str]:
    """Save the files and run the commands of a page in its order, from the working directory on.

    Args:
        page: Path in the repository.
        replaced: Texts of the page, each of which must occur, and their shorter versions.

    Returns:
        What each command printed.
    """
    pending, printed = dict(replaced), []
    with chdir("."):
        for block in blocks(page, "python", "yaml", "sh"):
            for text in [text for text in pending if text in block]:
                block = block.replace(text, pending.pop(text))
            if named := NAMED.match(block):
                Path(named[1]).write_text(block)
            else:
                printed += [text for line in block.splitlines() if (text := _run(line)) is not None]
    assert not pending, f"{page} does not have {list(pending)}"
    return printed


def _run(line: str) -> str | None:
    """The output of one command, which must succeed; None for one of the shell itself."""
    command, *words = shlex.split(line, comments=True)
    if command == "mkdir":
        Path(*words).mkdir()
    elif command == "cd":
        os.chdir(*words)
    else:
        assert command in ("asyncrl", "python"), line
        words = [word for word in words if word != "-m"] if command == "python" else [command, *words]
        return ran(*words)
    return None
