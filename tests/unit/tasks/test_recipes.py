"""The recipes of `asyncrl demo --recipe`: demonstrations that earn everything, in a tiny model's tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from missing import skip_without_sandbox
from PIL import Image

from asyncrl import demo as demos
from asyncrl.errors import TaskError
from asyncrl.models.loading import load_tokenizer
from asyncrl.models.prompts import ImageReader, encode_prompt
from asyncrl.offline.examples import Demonstration
from asyncrl.rewards.matching import ExactMatch
from asyncrl.tasks.generated import GeneratedRows, is_held_out
from asyncrl.tasks.pictures import CELL, GRID, NUMBERS, PLACES, tasks
from asyncrl.tasks.source import held_out, training_tasks
from asyncrl.types import Task

BEST = {"sokoban": 10.6, "webshop": 1.0, "search": 1.0, "python": 1.0}
"""Sokoban: 10 for the board, 1 for its box, -0.1 for each of four moves."""
BEST_DEMONSTRATIONS = {
    "sokoban": ["tasks.options.stays=0"],
    "webshop": ["tasks.options.hasty=0"],
    "search": ["tasks.options.guesses=0"],
    "python": ["tasks.options.guesses=0"],
}


@pytest.mark.parametrize("name", BEST)
async def test_demonstrations_earn_everything_within_the_lengths_of_the_recipe(
    name: str, tmp_path: Path
) -> None:
    if name == "python":
        skip_without_sandbox()
    config = demos.demo(str(tmp_path), BEST_DEMONSTRATIONS.get(name, []), name).config
    await asyncio.to_thread(demos.RECIPES[name].write_model, tmp_path / "model", config)
    tokenizer = load_tokenizer(dataclasses.replace(config.model, path=str(tmp_path / "model")))
    demonstration, stream = Demonstration(tokenizer, config), training_tasks(config)
    for task in map(stream.task_at, range(1000, 1003)):
        rollout = await demonstration.rollout(task)
        mask = np.asarray(rollout.loss_mask)
        turns = np.split(np.asarray(rollout.token_ids), np.flatnonzero(np.diff(mask)) + 1)[1::2]
        assert [tokenizer.decode(turn[:-1]) for turn in turns] == task.data["target"]
        assert max(map(len, turns)) <= config.generator.max_tokens
        segments = np.bincount(rollout.columns.get("segment", np.zeros(len(mask), int)))
        assert max(segments) <= config.generator.max_length
        assert len(turns) <= config.agent.max_turns
        assert tokenizer.unk_token_id not in rollout.token_ids
        answered = ExactMatch()(task, task.data["target"][-1]).parts if "answer" in task.data else 0.0
        assert rollout.reward + answered >= BEST[name] - 1e-6, task


def test_demonstrations_of_pictures_are_answers_that_the_model_can_give(tmp_path: Path) -> None:
    """Each place of the picture is one token, and each word of the questions and answers is known."""
    config = demos.demo(str(tmp_path), ["tasks.options.guesses=0"], "pictures").config
    demos.RECIPES["pictures"].write_model(tmp_path / "model", config)
    model = dataclasses.replace(config.model, path=str(tmp_path / "model"))
    tokenizer, reader, stream = load_tokenizer(model), ImageReader(model), training_tasks(config)
    for task in map(stream.task_at, range(100)):
        prompt = reader.prompt(task, encode_prompt(tokenizer, task))
        (shown,) = prompt.media
        assert shown.item.tokens == GRID**2
        answer = tokenizer.encode(task.data["target"], add_special_tokens=False)
        assert max(len(prompt.ids), len(answer)) <= 24
        assert tokenizer.unk_token_id not in [*prompt.ids, *answer]
        assert tokenizer.decode(answer) == task.data["target"]
        assert ExactMatch()(task, task.data["target"]).parts == 1.0


def test_answers_about_a_picture_can_be_read_from_its_pixels() -> None:
    questions = set()
    for row in map(tasks().__getitem__, range(60)):
        shown = dict(zip(PLACES, map(read_cell, cells(row["images"][0])), strict=True))
        kind, *_, last = row["prompt"].split()
        seen = [shape for shape in shown.values() if shape]
        if kind == "how":
            answer = NUMBERS[seen.count(last.removesuffix("s?")) - 1]
        else:
            (shape,) = seen
            answer = shape if kind == "what" else next(place for place in shown if shown[place])
        assert row["answer"] == answer, row["prompt"]
        questions.add(kind)
    assert questions == {"how", "where", "what"}


def cells(image: bytes) -> list[np.ndarray]:
    """[CELL, CELL, 3] of each place of a picture."""
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
    return [half for row in np.split(pixels, GRID) for half in np.split(row, GRID, axis=1)]


def read_cell(cell: np.ndarray) -> str:
    """The shape, by the pixels at its corners and in its middle; "" if there is none."""
    lit = cell.any(-1)
    if not lit.any():
        return ""
    if not lit[CELL // 2, CELL // 2]:
        return "ring"
    if lit[1, 1]:
        return "square"
    return "triangle" if lit[CELL - 2, 1] else "disk"


@pytest.mark.parametrize("name", [*BEST, "pictures"])
def test_no_task_is_held_out_and_trained_on(name: str, tmp_path: Path) -> None:
    config = demos.demo(str(tmp_path), name=name).config
    stream, (apart,) = training_tasks(config), held_out(config).values()
    trained = {question(stream.task_at(ordinal)) for ordinal in range(500)}
    assert not trained & set(map(question, apart))


def test_one_row_cannot_be_trained_on_and_held_out() -> None:
    row = {"prompt": "?", "target": "!"}
    rows = [GeneratedRows(lambda draw: row, 1, 0, held_out) for held_out in (False, True)]
    assert rows[is_held_out(row)][0] == row
    with pytest.raises(TaskError, match="too few different rows"):
        rows[not is_held_out(row)][0]


def question(task: Task) -> str:
    """All but the demonstration."""
    return f"{task.prompt} {sorted((name, value) for name, value in task.data.items() if name != 'target')}"
