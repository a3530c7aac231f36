"""Why a process ended, by its log: the cause, one traceback, the last lines without repeats. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

TRACEBACK = "Traceback (most recent call last):"
BY_TORCHRUN = "torch.distributed.elastic"
"""Tracebacks of torchrun itself, which are not the cause."""

RANK = re.compile(r"^\[(?:rank|default)\d+\]: ?")
"""Torchrun's mark of the rank that wrote a line."""

LAST_MESSAGE = re.compile(r"^asyncrl [a-z ]+: (?P<cause>\S.*)$")
"""How a command of asyncrl ends on an error that is raised on purpose."""

VARYING = re.compile(r"""'[^']*'|"[^"]*"|0x[0-9a-f]+|\d+""")


def why_it_ended(text: str, most: int) -> tuple[str, list[str]]:
    """(the cause in one line, empty if the log has none; what else its reader needs, at most `most` lines and a
    traceback).

    >>> why_it_ended("slow\\nTraceback (most recent call last):\\n  File\\nValueError: no\\n", 25)
    ('ValueError: no', ['Traceback (most recent call last):', '  File', 'ValueError: no', 'slow'])
    """
    tracebacks, others = _parted([RANK.sub("", line) for line in text.splitlines()])
    own = [one for one in tracebacks if not any(BY_TORCHRUN in line for line in one)]
    messages = [found["cause"] for line in others if (found := LAST_MESSAGE.match(line))]
    last = own[-1] if own else []
    cause = messages[-1] if messages else (last[-1].strip() if last else "")
    plain = [line for line in others if not LAST_MESSAGE.match(line)]
    return cause, [*last, *_without_repeats(plain)[-most:]]


def _parted(lines: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The tracebacks, each to the line of its error, and all other lines. The last of chained ones counts."""
    tracebacks: list[list[str]] = []
    others: list[str] = []
    inside = False
    for line in lines:
        if line.endswith(TRACEBACK):
            tracebacks.append([line])
            inside = True
        elif inside:
            tracebacks[-1].append(line)
            inside = not line.strip() or line.startswith(" ")
        else:
            others.append(line)
    return tracebacks, others


def _without_repeats(lines: Sequence[str]) -> list[str]:
    """The last of several lines that differ in numbers and quoted texts alone, with how many they are.

    >>> _without_repeats(["drops task 1", "drops task 2", "ends", "drops task 31"])
    ['ends', 'drops task 31 (3 such lines)']
    """
    counts = Counter(map(_shape, lines))
    kept = list(_last_of_each(lines))
    return [line if (count := counts[_shape(line)]) == 1 else f"{line} ({count} such lines)" for line in kept]


def _last_of_each(lines: Sequence[str]) -> Iterator[str]:
    last = {_shape(line): index for index, line in enumerate(lines)}
    return (line for index, line in enumerate(lines) if last[_shape(line)] == index)


def _shape(line: str) -> str:
    """A line without its numbers and quoted texts. One of numbers alone is like no other."""
    shape = VARYING.sub("0", line)
    return shape if any(map(str.isalpha, shape)) else line
