"""A vision-language-action sketch: a hand in a picture learns to reach a ball, by actions that are tokens.

    user        [picture] reach
    assistant   <b0><b3>            dx, dy: each of 5 bins of -1 … 1
    user        [picture] reach     the next picture, in a prompt of its own

    python examples/reach.py        # about 75 seconds on two CPU cores

Actions are tokens of the vocabulary, one for each bin of a dimension, as in RT-2 (arXiv:2307.15818) and OpenVLA
(arXiv:2406.09246, 256 bins). A model of random weights is shown moves that are noisy, and is then trained by
reinforcement learning in separate processes, its vision tower included.
"""

import io
import random
import re
import sys
from pathlib import Path

import asyncrl
from asyncrl.generator.agents.env import Environment, Observation
from asyncrl.tasks.pictures import CELL, write_viewer

CONFIG = Path(__file__).with_suffix(".yaml")
SIDE, BINS = 3, 5
NEAR = 0.1
ACTION = re.compile(r"<b(\d+)><b(\d+)>")


def bin_of(move):
    """The token of a move along one axis, in -1 … 1."""
    return f"<b{round((move + 1) / 2 * (BINS - 1))}>"


def moves_of(text):
    """(dx, dy), or None for a text that is no action."""
    found = ACTION.fullmatch(text.strip())
    return found and tuple(2 * int(number) / (BINS - 1) - 1 for number in found.groups())


def picture(hand, ball):
    """A PNG: the hand is a white square, the ball a red disk."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL))
    brush = ImageDraw.Draw(image)
    for (x, y), draw, colour in ((ball, brush.ellipse, "red"), (hand, brush.rectangle, "white")):
        left, top = (round(at * (SIDE - 1) * CELL) for at in (x, y))
        size = 12 if colour == "red" else 6
        draw((left + 1, top + 1, left + size, top + size), colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _rows(seed, count, noise=0.0):
    draw = random.Random(seed)
    cells = [[x / (SIDE - 1), y / (SIDE - 1)] for x in range(SIDE) for y in range(SIDE)]
    for _ in range(count):
        hand, ball = draw.sample(cells, 2)
        shift = [b - h for h, b in zip(hand, ball, strict=True)]
        if draw.random() < noise:
            shift = [draw.uniform(-1, 1), draw.uniform(-1, 1)]
        yield {"prompt": "reach", "hand": hand, "ball": ball, "target": "".join(map(bin_of, shift))}


def tasks(count=20000):
    return [*_rows(0, count)]


def held_out():
    return [*_rows(1, 100)]


def shown_moves():
    """Single turns for the warm-up: a picture and a move towards the ball, of which much is noise."""
    return [{**row, "images": [picture(row["hand"], row["ball"])]} for row in _rows(2, 6400, noise=0.6)]


class Reach(Environment):
    """Pays what the distance has become less, minus 0.1 a turn; 1 more, and the end, for a hand at the ball."""

    async def reset(self, task):
        self.hand, self.ball = list(task.data["hand"]), task.data["ball"]
        return self._messages()

    async def step(self, action):
        before, move = self._distance(), moves_of(action.text)
        if move is None:
            self.counts["malformed"] += 1
        else:
            self.hand = [min(1.0, max(0.0, at + by)) for at, by in zip(self.hand, move, strict=True)]
        near = self._distance() < NEAR
        return Observation(prompt=self._messages(), reward=before - self._distance() + near - 0.1, done=near)

    def _distance(self):
        return sum((h - b) ** 2 for h, b in zip(self.hand, self.ball, strict=True)) ** 0.5

    def _messages(self):
        shown = {"type": "image", "image": picture(self.hand, self.ball)}
        return [{"role": "user", "content": [shown, {"type": "text", "text": "reach"}]}]


def warm_up(words):
    """Shows moves to a new model. Returns its folder. words: as those of `main`"""
    from asyncrl.config.load import load_config
    from asyncrl.offline.process import train_supervised

    folder = Path(load_config(CONFIG, ["model.path=unused", *words]).run.dir) / "reach-model"
    write_viewer(folder / "random", ["reach"], SIDE, pieces=[f"<b{number}>" for number in range(BINS)])
    turns = ["agent.environment=null", "tasks.source=examples/reach.py:shown_moves", "evaluation.source=null"]
    warm = [f"model.path={folder / 'random'}", f"sft.output={folder / 'warm'}", "sft.steps=150"]
    train_supervised(load_config(CONFIG, [*warm, *turns, "tasks.images_key=images", *words]))
    return folder / "warm"


def main(words):
    """words: further settings, as on the command line. Returns the summary of the run."""
    summary = asyncrl.train(CONFIG, [f"model.path={warm_up(words)}", *words])
    start, end = summary["heldout_accuracy_start"], summary["heldout_accuracy_end"]
    print(f"held-out reward: {start:.2f} -> {end:.2f} in {summary['train_s']:.0f} s")
    return summary


if __name__ == "__main__":
    main(sys.argv[1:])
