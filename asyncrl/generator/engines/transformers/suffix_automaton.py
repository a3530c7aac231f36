"""A suffix automaton of sequences that grow side by side: it knows the longest end of a sequence that stood anywhere
before, and the token that came last behind it. Pure.

    "abcab", then "xabc"                     the end "abc" stood before ─▸ "a" is likely next, then "b"

A state is a set of substrings that end at the same places; its link leads to the longest end that is in another state
(Blumer et al. 1985). A sequence's own state is the caller's: all its tokens are the longest substring of it, and stay
so, since a split gives the shorter ones a new state. A token adds two states at most.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

ROOT = 0
"""The state of the empty sequence."""

MARKED = 32
"""Ends of a sequence, from the longest on, whose last token is noted: bounds the time that one token takes."""


class Likely(NamedTuple):
    """A token that may come next. matched: the number of tokens before it that stood before it earlier"""

    token: int
    matched: int


class SuffixAutomaton:
    """Of most states only one token leads on: it is in arrays, and others are in dictionaries."""

    def __init__(self) -> None:
        self._length, self._link = array("q"), array("q")
        self._token, self._target = (
            array("q"),
            array("q"),
        )  # that came last, -1 if none, and the state behind it
        self._others: dict[int, dict[int, int]] = {}
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
        self._mark(state, token)
        return target

    def continuation(self, state: int, most: int) -> list[Likely]:
        """Up to `most` tokens that are likely behind the sequence of this state. Each is the one that came last behind
        the longest end that stood before, of the sequence and the tokens found so far."""
        found: list[Likely] = []
        matched = self._length[state]
        while len(found) < most:
            while state != ROOT and self._token[state] < 0:
                state = self._link[state]
                matched = self._length[state]
            if state == ROOT:
                break
            found.append(Likely(self._token[state], matched))
            state, matched = self._target[state], matched + 1
        return found

    def _add(self, length: int, link: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._token.append(-1)
        self._target.append(-1)
        return len(self._length) - 1

    def _next(self, state: int, token: int) -> int:
        """The state behind a token; -1: none."""
        if self._token[state] == token:
            return self._target[state]
        others = self._others.get(state)
        return -1 if others is None else others.get(token, -1)

    def _lead(self, state: int, token: int, target: int) -> None:
        """Let a token lead to a state, and be the one that came last."""
        before = self._token[state]
        if before not in (-1, token):
            others = self._others.setdefault(state, {})
            others[before] = self._target[state]
            others.pop(token, None)
        self._token[state], self._target[state] = token, target

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
        self._token[shorter], self._target[shorter] = self._token[target], self._target[target]
        if others := self._others.get(target):
            self._others[shorter] = dict(others)
        self._link[target] = shorter
        while state >= 0 and self._next(state, token) == target:
            if self._token[state] == token:
                self._target[state] = shorter
            else:
                self._others[state][token] = shorter
            state = self._link[state]
        return shorter

    def _mark(self, state: int, token: int) -> None:
        """The token came last behind a sequence, and so behind its ends."""
        for _ in range(MARKED):
            if state < 0:
                return
            if self._token[state] != token:
                self._lead(state, token, self._others[state][token])
            state = self._link[state]
