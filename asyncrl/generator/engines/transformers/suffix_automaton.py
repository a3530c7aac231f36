"""A suffix automaton of sequences that grow side by side: it knows how often each token came behind each end of a
sequence, wherever that end stood before. Pure.

    "abcab", then "xabc"                     "c", "bc" and "abc" stood before ─▸ "a" is likely next, then "b"

A state is a set of substrings that end at the same places; its link leads to the longest end that is in another state
(Blumer et al. 1985). A sequence's own state is the caller's: all its tokens are the longest substring of it, and stay
so, since a split gives the shorter ones a new state. A token adds two states at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

ROOT = 0
"""The state of the empty sequence."""

COUNTED = 32
"""Ends of a sequence, from the longest on, behind which a token is counted: bounds the time that one token takes."""


class Likely(NamedTuple):
    """A token that may come next. share: c / (n + 2), where it came c of n times behind an end of the sequence"""

    token: int
    share: float


class SuffixAutomaton:
    """Behind most states only one token came: the most frequent one, of equals the latest, is in arrays, and others are
    in dictionaries."""

    def __init__(self) -> None:
        self._length, self._link, self._total = array("q"), array("q"), array("q")
        self._token, self._target, self._count = array("q"), array("q"), array("q")
        self._others: dict[int, dict[int, tuple[int, int]]] = {}  # token → state behind it, count
        self._add(0, -1)

    def __len__(self) -> int:
        """The number of states."""
        return len(self._length)

    def extend(self, state: int, token: int) -> int:
        """The state of a sequence with one token more. state: the sequence's own, ROOT or one that this returned"""
        target = self._next(state, token)
        if target < 0:
            target = self._grow(state, token)
        elif self._length[target] != self._length[state] + 1:
            target = self._split(state, token, target)
        for _ in range(COUNTED):
            self._count_one(state, token)
            state = self._link[state]
            if state < 0:
                break
        return target

    def continuation(self, state: int) -> Iterator[Likely]:
        """Tokens that are likely behind the sequence of this state, one behind the other. Each has the greatest share
        behind an end of the sequence and the tokens before it; of equals that behind the longest end."""
        while True:
            share, token, end = 0.0, -1, state
            for _ in range(COUNTED):
                if end == ROOT:
                    break
                if self._count[end] > share * (self._total[end] + 2):
                    share, token = self._count[end] / (self._total[end] + 2), self._token[end]
                end = self._link[end]
            if token < 0:
                return
            yield Likely(token, share)
            while (target := self._next(state, token)) < 0:
                state = self._link[state]
            state = target

    def _add(self, length: int, link: int) -> int:
        for of_state, value in (
            (self._length, length),
            (self._link, link),
            (self._total, 0),
            (self._token, -1),
            (self._target, -1),
            (self._count, 0),
        ):
            of_state.append(value)
        return len(self._length) - 1

    def _next(self, state: int, token: int) -> int:
        """The state behind a token; -1: none."""
        if self._token[state] == token:
            return self._target[state]
        others = self._others.get(state)
        return -1 if others is None or token not in others else others[token][0]

    def _lead(self, state: int, token: int, target: int) -> None:
        """Let a token lead to a state."""
        if self._token[state] in (-1, token):
            self._token[state], self._target[state] = token, target
        else:
            others = self._others.setdefault(state, {})
            others[token] = target, others.get(token, (0, 0))[1]

    def _count_one(self, state: int, token: int) -> None:
        """The token came behind a state, and leads on from there."""
        self._total[state] += 1
        if self._token[state] == token:
            self._count[state] += 1
            return
        others = self._others[state]
        target, count = others[token]
        if count + 1 < self._count[state]:
            others[token] = target, count + 1
            return
        del others[token]
        others[self._token[state]] = self._target[state], self._count[state]
        self._token[state], self._target[state], self._count[state] = token, target, count + 1

    def _grow(self, state: int, token: int) -> int:
        new = self._add(self._length[state] + 1, ROOT)
        while state >= 0 and self._next(state, token) < 0:
            self._lead(state, token, new)
            state = self._link[state]
        if state >= 0:
            target = self._next(state, token)
            apart = self._length[target] != self._length[state] + 1
            self._link[new] = self._split(state, token, target) if apart else target
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """A state of its own for the shorter substrings of `target`, those that end with `token` behind `state`."""
        shorter = self._add(self._length[state] + 1, self._link[target])
        for of_state in (self._total, self._token, self._target, self._count):
            of_state[shorter] = of_state[target]
        if others := self._others.get(target):
            self._others[shorter] = dict(others)
        self._link[target] = shorter
        while state >= 0 and self._next(state, token) == target:
            self._lead(state, token, shorter)
            state = self._link[state]
        return shorter
