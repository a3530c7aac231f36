"""The suffix automaton against a search through all that was read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generator.engines.transformers.suffix_automaton import MARKED, ROOT, Likely, SuffixAutomaton

Written = list[tuple[int, int]]
"""(sequence, token) in the order in which sequences grow."""

WRITTEN = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=MARKED - 2)
"""So short that all ends of a sequence are noted."""


def read(written: Written) -> tuple[SuffixAutomaton, dict[int, int]]:
    """The automaton, and the state of each sequence."""
    automaton, states = SuffixAutomaton(), dict[int, int]()
    for sequence, token in written:
        states[sequence] = automaton.extend(states.get(sequence, ROOT), token)
    return automaton, states


def latest_behind(written: Written, end: list[int]) -> int | None:
    """The token that came last behind these tokens, in any sequence."""
    sequences, found = dict[int, list[int]](), None
    for sequence, token in written:
        tokens = sequences.setdefault(sequence, [])
        if tokens[len(tokens) - len(end) :] == end and len(tokens) >= len(end):
            found = token
        tokens.append(token)
    return found


def by_search(written: Written, sequence: int, most: int) -> list[Likely]:
    tokens = [token for one, token in written if one == sequence]
    found: list[Likely] = []
    matched = len(tokens)
    while len(found) < most and matched > 0:
        token = latest_behind(written, tokens[len(tokens) - matched :])
        if token is None:
            matched -= 1
            continue
        found.append(Likely(token, matched))
        tokens.append(token)
        matched += 1
    return found


@given(WRITTEN)
def test_drafts_are_those_that_a_search_finds(written: Written) -> None:
    automaton, states = read(written)
    for sequence, state in states.items():
        assert automaton.continuation(state, 6) == by_search(written, sequence, 6)


@given(WRITTEN)
def test_a_token_adds_two_states_at_most(written: Written) -> None:
    automaton, _ = read(written)
    assert len(automaton) <= max(1, 2 * len(written)) + 1


def test_by_hand() -> None:
    automaton = SuffixAutomaton()
    first = second = ROOT
    for letter in b"abcab":
        first = automaton.extend(first, letter)
    for letter in b"xabc":
        second = automaton.extend(second, letter)
    assert automaton.continuation(second, 3) == [Likely(97, 3), Likely(98, 4), Likely(99, 2)]
    assert automaton.continuation(first, 1) == [Likely(99, 2)]
    assert automaton.continuation(ROOT, 3) == []


def test_the_latest_token_counts_not_the_first() -> None:
    automaton = SuffixAutomaton()
    for text in (b"ab", b"ac", b"ab", b"ac"):
        state = ROOT
        for letter in text:
            state = automaton.extend(state, letter)
    state = automaton.extend(ROOT, b"a"[0])
    assert automaton.continuation(state, 1) == [Likely(b"c"[0], 1)]
