"""The suffix automaton against a search through all that was read."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generator.engines.transformers.suffix_automaton import COUNTED, ROOT, Likely, SuffixAutomaton

Written = list[tuple[int, int]]
"""(sequence, token) in the order in which sequences grow."""

WRITTEN = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=COUNTED - 2)
"""So short that tokens are counted behind all ends of a sequence."""


def read(written: Written) -> tuple[SuffixAutomaton, dict[int, int]]:
    """The automaton, and the state of each sequence."""
    automaton, states = SuffixAutomaton(), dict[int, int]()
    for sequence, token in written:
        states[sequence] = automaton.extend(states.get(sequence, ROOT), token)
    return automaton, states


def counted_behind(written: Written, end: list[int]) -> tuple[float, int] | None:
    """The share of the token that came most often behind these tokens, in any sequence, and the token: of equals the
    one that came last."""
    sequences, counts, best = dict[int, list[int]](), Counter[int](), None
    for sequence, token in written:
        tokens = sequences.setdefault(sequence, [])
        if tokens[len(tokens) - len(end) :] == end and len(tokens) >= len(end):
            counts[token] += 1
            best = token if best is None or counts[token] >= counts[best] else best
        tokens.append(token)
    return None if best is None else (counts[best] / (counts.total() + 2), best)


def by_search(written: Written, sequence: int, most: int) -> list[Likely]:
    tokens = [token for one, token in written if one == sequence]
    found: list[Likely] = []
    for _ in range(most):
        ends = [tokens[start:] for start in range(len(tokens))]  # the longest first
        behind = [each for end in ends if (each := counted_behind(written, end)) is not None]
        if not behind:
            break
        share, token = max(behind, key=lambda each: each[0])
        found.append(Likely(token, share))
        tokens.append(token)
    return found


@given(WRITTEN)
def test_drafts_are_those_that_a_search_finds(written: Written) -> None:
    automaton, states = read(written)
    for sequence, state in states.items():
        assert [*islice(automaton.continuation(state), 6)] == by_search(written, sequence, 6)


@given(WRITTEN)
def test_a_token_adds_two_states_at_most(written: Written) -> None:
    automaton, _ = read(written)
    assert len(automaton) <= max(1, 2 * len(written)) + 1


def test_by_hand() -> None:
    automaton, states = read([(0, letter) for letter in b"abcab"] + [(1, letter) for letter in b"xabc"])
    assert [*islice(automaton.continuation(states[1]), 3)] == [
        Likely(97, 1 / 3),
        Likely(98, 0.6),
        Likely(99, 0.5),
    ]
    assert [*islice(automaton.continuation(states[0]), 1)] == [Likely(99, 0.5)]
    assert [*automaton.continuation(ROOT)] == []


def test_a_short_end_that_stood_often_is_better_than_a_long_one_that_stood_once() -> None:
    """ "b" behind "a" came four times of five, "c" behind "xa" once of once."""
    written = [(0, letter) for letter in b"xacabababab"]
    automaton, states = read([*written, *((1, letter) for letter in b"xa")])
    assert [*islice(automaton.continuation(states[1]), 1)] == [Likely(b"b"[0], 4 / 7)]


def test_of_equals_the_latest_token_is_likely() -> None:
    texts = enumerate((b"ab", b"ac", b"ab", b"ac"))
    automaton, _ = read([(number, letter) for number, text in texts for letter in text])
    assert next(automaton.continuation(automaton.extend(ROOT, b"a"[0]))) == Likely(b"c"[0], 2 / 6)
