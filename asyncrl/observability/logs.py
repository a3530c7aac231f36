"""Logs of processes: why one ended, in a line, and the lines that a reader needs."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence

TRACEBACK = "Traceback (most recent call last):"
BY_TORCHRUN = "torch.distributed.elastic"
"""Tracebacks of torchrun itself, which are not the cause."""

RANK = re.compile(r"^\[(?:rank|default)(?P<rank>\d+)\]: ?")
"""The mark of the rank that wrote a line, by torch, torchrun or ranks.py; the first rank's lines may have none."""

ENDED_FIRST = re.compile(r": rank (\d+) ended first ")
"""The line that ranks.py writes about the rank that made the others end."""

LAST_MESSAGE = re.compile(r"^asyncrl (?P<who>[a-z ]+): (?P<cause>\S.*)$")
"""The last line of a command of asyncrl that ends on an error that is raised on purpose; or a note of the LAUNCHER on a
process of a cluster, which explains an end where nothing else does."""

LAUNCHER = "train"

VARYING = re.compile(r"""'[^']*'|"[^"]*"|0x[0-9a-f]+|\d+""")


def describe_exit(code: int) -> str:
    """
    >>> describe_exit(2), describe_exit(-9)
    ('exit code 2', 'killed by SIGKILL')
    """
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def why_it_ended(text: str, most: int) -> tuple[str, list[str]]:
    """(the cause in one line, empty if the log has none; what else its reader needs, at most `most` lines and a
    traceback).

    >>> why_it_ended("slow\\nTraceback (most recent call last):\\n  File\\nValueError: no\\n", 25)
    ('ValueError: no', ['Traceback (most recent call last):', '  File', 'ValueError: no', 'slow'])
    """
    lines = _of_the_cause(_of_the_last_start(text.splitlines()))
    tracebacks, others = _parted([RANK.sub("", line) for line in lines])
    own = [one for one in tracebacks if not any(BY_TORCHRUN in line for line in one)]
    messages = [found for line in others if (found := LAST_MESSAGE.match(line))]
    last = own[-1] if own else []
    causes = [one["cause"] for one in messages if one["who"] == LAUNCHER]
    causes += [line.strip() for line in last[-1:]]
    causes += [one["cause"] for one in messages if one["who"] != LAUNCHER]
    cause = causes[-1] if causes else ""
    plain = [line for line in others if not LAST_MESSAGE.match(line)]
    return cause, [*last, *_without_repeats(plain)[-most:]]


def _of_the_cause(lines: Sequence[str]) -> Sequence[str]:
    """The lines of the rank that ended first, if there is one: what the others write then is its consequence."""
    first = [found[1] for line in lines if (found := ENDED_FIRST.search(line))]
    if not first:
        return lines
    return [line for line in lines if (mark["rank"] if (mark := RANK.match(line)) else "0") == first[-1]]


def _of_the_last_start(lines: Sequence[str]) -> Sequence[str]:
    """Lines behind the notes with which the launcher has explained the ends of earlier starts."""
    found = [LAST_MESSAGE.match(line) for line in lines]
    noted = [one is not None and one["who"] == LAUNCHER for one in found]
    end = len(lines)
    while end and found[end - 1] is None and not lines[end - 1].endswith(TRACEBACK):
        end -= 1
    while end and noted[end - 1]:
        end -= 1
    return lines[max((at + 1 for at in range(end) if noted[at]), default=0) :]


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
    last = {_shape(line): index for index, line in enumerate(lines)}
    kept = [(line, counts[_shape(line)]) for index, line in enumerate(lines) if last[_shape(line)] == index]
    return [line if count == 1 else f"{line} ({count} such lines)" for line, count in kept]


def _shape(line: str) -> str:
    """A line without its numbers and quoted texts. One of numbers alone is like no other."""
    shape = VARYING.sub("0", line)
    return shape if any(map(str.isalpha, shape)) else line
