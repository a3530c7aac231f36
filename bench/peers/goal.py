"""The demo's task and settings for systems that are not asyncrl, and the line that each prints at its end.

Without asyncrl's configuration: the packages of another environment import it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

GROUPS, SAMPLES = 64, 4
"""Of a step: prompts, and answers of each."""

NEW_TOKENS = 12
RATE, WARM_UP, STEPS = 2e-4, 10, 400
"""Learning rate: rises linearly for WARM_UP steps, then falls linearly to 0 at STEPS."""

SCALE = 2.857
"""Of advantages: 1 / 0.35."""

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TARGET, LOOK_EVERY = 0.97, 20
"""Greedy accuracy on the held-out tasks, and the steps between two looks at it."""


@dataclass
class Race:
    """What one system has to do, and its clock, which runs from the start of its process."""

    folder: Path
    model: Path
    limit_s: float
    seed: int
    begun: float

    @staticmethod
    def from_words() -> Race:
        parser = argparse.ArgumentParser()
        parser.add_argument(
            "folder", type=Path, help="with train.json and heldout.json: rows {prompt, answer}"
        )
        parser.add_argument("model", type=Path, help="warmed up")
        parser.add_argument("--threads", type=int, default=2)
        parser.add_argument("--limit-s", type=float, default=300)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--begun", type=float, default=time.time(), help="when the process was started")
        words = parser.parse_args()
        import torch

        torch.set_num_threads(words.threads)
        torch.manual_seed(words.seed)
        return Race(words.folder, words.model, words.limit_s, words.seed, words.begun)

    @property
    def seconds(self) -> float:
        return time.time() - self.begun

    def rows(self, name: str) -> list[dict[str, str]]:
        """'train' in an order of this seed, or 'heldout'."""
        rows: list[dict[str, str]] = json.loads((self.folder / f"{name}.json").read_text())
        if name == "train":
            random.Random(self.seed).shuffle(rows)
        return rows

    def is_over(self, accuracy: float) -> bool:
        return accuracy >= TARGET or self.seconds > self.limit_s

    def end(self, accuracy: float, step_s: list[float]) -> None:
        """Print the result on one line. step_s: seconds of each step, looks excluded"""
        result = {"accuracy": accuracy, "seconds": self.seconds, "steps": len(step_s)}
        print(
            json.dumps({**result, "rollouts_per_s": GROUPS * SAMPLES * len(step_s) / sum(step_s)}), flush=True
        )


def right(text: str, answer: str, ended: bool) -> float:
    """1 if the text behind the last '>' is the answer, and the model ended there by itself."""
    return float(ended and ">" in text and text.rpartition(">")[2] == answer)
