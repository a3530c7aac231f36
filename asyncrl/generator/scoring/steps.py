"""Steps of an answer: a reward function's values of stretches of text, as values per token.

    text      2 1 , 3 1 , > 1 3 2          steps   [0, 3) [3, 6) [6, 10)
    tokens    21 | , | 31 | , | > | 132 | $        the end token $ makes no character
    ends_T    2    3   5    6   7   10    10
    step_T    0    0   1    1   2   2     2        rewards on the last token of each step

Axes:  T output tokens · L tokens of the rollout, prompt first · S steps
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import takewhile
from numbers import Integral, Real
from typing import Any

import numpy as np

from asyncrl.types import COLUMNS, Array, Step

Decode = Callable[[Array], str]
"""Token ids → their text."""

LARGEST = 1e30
"""Rewards travel as float32, in which sums of many this large are still finite."""


def real(value: Any) -> float:
    """A bool, int or float of Python, NumPy or an array of one such number. Raises TypeError for anything else, e.g. a
    text that reads like a number.

    >>> real(True), real(np.float32(0.5))
    (1.0, 0.5)
    """
    scalar = value.item() if getattr(value, "shape", None) is not None and hasattr(value, "item") else value
    if isinstance(scalar, Real):
        return float(scalar)
    raise TypeError(f"{type(value).__name__} is no number; a bool, an int or a float is one")


def check_steps(steps: Sequence[Step], text: str) -> None:
    """Raises ValueError unless they lie in the text, one after another, with valid rewards and anchors."""
    before = 0
    for at, step in enumerate(steps):
        if not isinstance(step, Step):
            raise ValueError(f"step {at} is {step!r}, not an asyncrl.Step")
        whole = isinstance(step.start, Integral) and isinstance(step.stop, Integral)
        if not (whole and before <= step.start < step.stop <= len(text)):
            raise ValueError(
                f"step {at} is [{step.start}, {step.stop}), which must be a character or more "
                f"of [{before}, {len(text)}): the text from where the step before it stops"
            )
        if not abs(real(step.reward)) <= LARGEST:
            raise ValueError(
                f"the reward of step {at} is {step.reward!r}, not a finite number up to {LARGEST:g}"
            )
        if not isinstance(step.anchor, str | bytes | Integral | None):
            raise ValueError(f"the anchor of step {at} is {step.anchor!r}, not a text, bytes or an integer")
        before = step.stop


def step_columns(steps: Sequence[Step], text: str, ends_T: Array, length: int) -> dict[str, Array]:
    """{name: [L]} of `types.COLUMNS`, L = `length`; the T output tokens are the rollout's last.

    A token belongs to the first step with a character in it; one without characters (an end token) belongs to the
    character before it. A step without a token of its own gives its reward to the token it lies in.
    """
    owner_T = _owners(steps, ends_T)
    rewards_T = np.zeros(len(ends_T))
    for s, step in enumerate(steps):
        own = np.flatnonzero(owner_T == s)
        last = own[-1] if own.size else np.searchsorted(ends_T, step.stop - 1, side="right")
        rewards_T[last] += step.reward
    inside_T = owner_T >= 0
    anchors_S = np.array([anchor_hash(step, text) for step in steps], np.int64)
    step_T, anchor_T = np.full(len(ends_T), -1), np.zeros(len(ends_T), np.int64)
    _, step_T[inside_T] = np.unique(owner_T[inside_T], return_inverse=True)  # without gaps
    anchor_T[inside_T] = anchors_S[owner_T[inside_T]]
    return {
        "step": _after_prompt(step_T, "step", length, -1),
        "anchor": _after_prompt(anchor_T, "anchor", length, 0),
        "step_rewards": _after_prompt(rewards_T, "step_rewards", length, 0),
    }


def anchor_hash(step: Step, text: str) -> int:
    """`state_hash` of the state in which the step begins."""
    return state_hash(text[: step.start] if step.anchor is None else step.anchor)


def state_hash(state: str | bytes | int) -> int:
    """A signed 64-bit number, the same in every process."""
    if isinstance(state, bytes):
        kind, raw = b"bytes", state
    else:  # 1 and "1" are two states
        kind = b"text" if isinstance(state, str) else b"integer"
        raw = str(state).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, person=kind).digest(), "little", signed=True)


def token_ends(decode: Decode, ids_T: Array, text: str) -> Array:
    """[T] int64: the characters of `text`, to which all ids decode, up to and with each token. Never falls.

    Decodes a few tokens at a time: the cost is linear in T. A character whose bytes lie in several tokens counts with
    the one that completes it.
    """
    ends_T = np.zeros(len(ids_T), np.int64)
    # Tokens below `settled` are done and make `made` characters. A decoder may treat the first token of a text
    # differently, so a piece is decoded behind the piece before it: from `context` on, whose text is `head`.
    context = settled = made = 0
    head = ""
    for t in range(len(ids_T)):
        piece = decode(ids_T[context : t + 1])[len(head) :]
        if text.startswith(piece, made):
            made += len(piece)
            if piece:
                context, head = settled, decode(ids_T[settled : t + 1])
            settled = t + 1
            ends_T[t] = made
        else:  # half a character
            ends_T[t] = made + _shared(piece, text[made : made + len(piece)])
    ends_T[-1:] = len(text)
    return np.minimum(np.maximum.accumulate(ends_T), len(text))


def _shared(one: str, other: str) -> int:
    """The length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _owners(steps: Sequence[Step], ends_T: Array) -> Array:
    """[T] index of the step that each token belongs to, -1 for none."""
    begins_T = np.concatenate([[0], ends_T])[:-1]
    first_T = np.maximum(np.minimum(begins_T, ends_T - 1), 0)  # of a token without characters: the one before
    stops_T = np.maximum(ends_T, first_T + 1)
    beyond = np.iinfo(np.int64).max  # one more step, which no token reaches
    start_S = np.array([*(step.start for step in steps), beyond])
    stop_S = np.array([*(step.stop for step in steps), beyond])
    owner_T = np.searchsorted(stop_S, first_T, side="right")  # the first step that stops beyond
    return np.where(start_S[owner_T] < stops_T, owner_T, -1)


def _after_prompt(values_T: Array, name: str, length: int, fill: int) -> Array:
    """[L] in the column's dtype."""
    column = np.full(length, fill, COLUMNS[name])
    column[length - len(values_T) :] = values_T
    return column
