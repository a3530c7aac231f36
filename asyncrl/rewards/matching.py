"""Rewards that compare texts: 1 if the task accepts the answer, else 0."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import Any

import regex

from asyncrl.config.rules import require
from asyncrl.errors import ConfigError
from asyncrl.types import Scored, Task

IGNORABLE = ("case", "punctuation", "articles", "commas")
"""case · punctuation at both ends · the words a, an, the · commas between digits."""

SEARCH_S = 1.0
"""Time limit of a search, because some patterns take exponential time on some texts."""

ARTICLES = regex.compile(r"\b(a|an|the)\b", regex.IGNORECASE)
COMMAS = regex.compile(r"(?<=\d),(?=\d{3}\b)")


class ExactMatch:
    """1 if the text is the answer.

    answer  the field of task.data with the answer: a text, a number, or a list of accepted ones
    after   compare only the text behind the last `after`; a text without it earns 0
    ignore  differences to ignore, from `IGNORABLE`; the amount of white space never counts
    """

    def __init__(self, answer: str = "answer", after: str | None = None, ignore: Sequence[str] = ()) -> None:
        self._answer, self._after, self._ignore = answer, after, _known_options(ignore)

    def __call__(self, task: Task, text: str) -> Scored:
        if self._after is not None:
            _, found, text = text.rpartition(self._after)
            if not found:
                return Scored(0.0)
        return judged(text, task.data[self._answer], self._ignore)


class RegexMatch:
    r"""1 if the pattern's last match is the answer.

    pattern  its first group is compared, if it has one, e.g. '#### (-?[\d,.]+)'
    answer   the field of task.data, as for `ExactMatch`; None: any match earns 1
    ignore   as for `ExactMatch`
    """

    def __init__(self, pattern: str, answer: str | None = "answer", ignore: Sequence[str] = ()) -> None:
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            require(False, "pattern", pattern, f"is no regular expression: {error}", "correct it")
        self._answer, self._ignore = answer, _known_options(ignore)

    def __call__(self, task: Task, text: str) -> Scored:
        found = self._last(text)
        if found is None or self._answer is None:
            return Scored(float(found is not None))
        return judged(found, task.data[self._answer], self._ignore)

    def _last(self, text: str) -> str | None:
        found = None
        try:
            # `concurrent` releases the interpreter lock, so that other threads go on.
            for match in self._pattern.finditer(text, concurrent=True, timeout=SEARCH_S):
                found = match[1] if self._pattern.groups else match[0]
        except TimeoutError:
            return None
        return found


def _known_options(ignore: Sequence[str]) -> frozenset[str]:
    """Raises ConfigError for names that are not in `IGNORABLE`."""
    names = frozenset([ignore] if isinstance(ignore, str) else ignore)
    for name in sorted(names.difference(IGNORABLE)):
        raise ConfigError("ignore", ignore, f"{name!r} is none of {', '.join(IGNORABLE)}", "take it out")
    return names


def judged(text: str, answers: Any, ignore: Iterable[str]) -> Scored:
    """1 if `text` is one of `answers`, which may be a single one.

    >>> judged(" The  Moon.", ["moon", "luna"], {"case", "punctuation", "articles"})
    Scored(parts=1.0, steps=None, answer='moon')
    """
    several = answers if isinstance(answers, list | tuple) else [answers]
    answer = normalised(text, ignore)
    return Scored(float(answer in {normalised(str(one), ignore) for one in several}), answer=answer)


def normalised(text: str, ignore: Iterable[str]) -> str:
    """
    >>> normalised("  1,234,567 km. ", {"commas", "punctuation"})
    '1234567 km'
    """
    text = text.casefold() if "case" in ignore else text
    text = COMMAS.sub("", text) if "commas" in ignore else text
    text = ARTICLES.sub(" ", text) if "articles" in ignore else text
    text = " ".join(text.split())
    return text.strip(string.punctuation + " ") if "punctuation" in ignore else text
