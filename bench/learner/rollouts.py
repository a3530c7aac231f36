"""Rollouts of known lengths, the same for every system: numpy alone, since peers have other packages.

short        16 to 256 answer tokens, all lengths as likely
long_tail    16 to 2048, every octave as likely: many short answers and a few very long ones
long_prompt  16 to 256 after a prompt of 512; the others' prompts have 16 tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PROMPT = {"short": 16, "long_tail": 16, "long_prompt": 512}
VOCABULARY = 4096
SHORTEST = 16
LONGEST = {"short": 256, "long_tail": 2048, "long_prompt": 256}
GROUP = 8
"""Rollouts of one prompt."""

LIKELY = -8.3
"""Log-prob that is recorded for every token: about what a random model of this vocabulary says of any."""


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: list[int]
    answer: list[int]
    reward: float


def samples(kind: str, groups: int, scale: float = 1.0) -> list[list[Sample]]:
    """Groups of rollouts; each group's rewards differ. scale: of all lengths, for a trial."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(groups):
        prompt = random.integers(3, VOCABULARY, PROMPT[kind]).tolist()
        lengths = [max(1, round(scale * length)) for length in _lengths(kind, random)]
        made.append(
            [
                Sample(prompt, random.integers(3, VOCABULARY, length).tolist(), float(i % 3))
                for i, length in enumerate(lengths)
            ]
        )
    return made


def _lengths(kind: str, random: np.random.Generator) -> list[int]:
    longest = LONGEST[kind]
    if kind == "long_tail":
        return np.exp(random.uniform(np.log(SHORTEST), np.log(longest), GROUP)).astype(int).tolist()
    return random.integers(SHORTEST, longest + 1, GROUP).tolist()
