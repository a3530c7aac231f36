"""Evaluation sets that a configuration includes: from a row in the shape of its card to a score."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_rows import CHOICES, ROWS, write_hub
from missing import skip_without_sandbox
from tiny_recipes import hub_names

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, TaskError
from asyncrl.rewards import MathVerify
from asyncrl.rewards.contests import ContestTests
from asyncrl.tasks.datasets.benchmarks import gpqa, gsm8k, live_code_bench
from asyncrl.tasks.source import held_out
from asyncrl.types import Task

BASE = """\
include: [{include}]
model: {{path: some/model}}
tasks: {{source: "asyncrl.tasks.echo:rows"}}
reward: {{function: "asyncrl.rewards:MathVerify"}}
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    write_hub(folder)
    return folder


def with_local_rows(path: Path, hub: Path) -> Config:
    words = [
        f"{key}={json.dumps(str(hub / name.removeprefix('hf:')))}"
        for key, name in hub_names(load_config(path))
    ]
    return load_config(path, words)


def sets(name: str, folder: Path, hub: Path) -> dict[str, list[Task]]:
    """The held-out tasks of configs/evaluation/NAME.yaml."""
    path = folder / "run.yaml"
    path.write_text(BASE.format(include=f"evaluation/{name}.yaml"))
    return held_out(with_local_rows(path, hub))


def parts(score: Any) -> float:
    return float(getattr(score, "parts", score))


def test_values_of_mathematics_are_scored(tmp_path: Path, hub: Path) -> None:
    judge = MathVerify()
    scored = {}
    for name in ("aime", "math_500", "gpqa_diamond"):
        for own, tasks in sets(name, tmp_path, hub).items():
            system, question = tasks[0].prompt
            assert (system["role"], question["role"]) == ("system", "user")
            assert r"\boxed{}" in system["content"]
            right = rf"Thus \boxed{{{tasks[0].data['answer']}}}."
            wrong = r"Thus \boxed{5}." if own != "gpqa_diamond" else r"Thus \boxed{E}."
            scored[own] = [parts(judge(tasks[0], text)) for text in (right, wrong, "no idea")]
    judge.close()
    names = ("aime_2024", "aime_2025", "math_500", "gpqa_diamond")
    assert scored == {name: [1.0, 0.0, 0.0] for name in names}


def test_samplings_are_those_of_the_sources(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BASE.format(include="evaluation/aime.yaml, evaluation/gpqa_diamond.yaml"))
    chosen = load_config(path).evaluation.named_sets
    assert {name: (one.samples, one.temperature, one.top_p) for name, one in chosen.items()} == {
        "aime_2024": (32, 1.0, 0.7),
        "aime_2025": (32, 1.0, 0.7),
        "gpqa_diamond": (4, 0.6, 0.95),
    }


def test_choices_are_shown_in_an_order_that_does_not_tell_the_right_one(hub: Path) -> None:
    rows = gpqa(str(hub / "Idavidrein/gpqa"))
    shown = [rows[index] for index in range(len(rows))]
    assert len({row["answer"] for row in shown}) > 1, "the right choice is always the same letter"
    for row in shown:
        lines = dict(line.split(". ", 1) for line in row["prompt"].splitlines()[-4:])
        assert list(lines) == list("ABCD")
        assert sorted(lines.values()) == sorted(choice.strip() for choice in CHOICES.values())
        assert lines[row["answer"]] == "a proton"
    assert shown[0] == gpqa(str(hub / "Idavidrein/gpqa"))[0]


def test_programs_of_both_kinds_are_scored(tmp_path: Path, hub: Path) -> None:
    skip_without_sandbox()
    judge = ContestTests()
    reads, calls = sets("live_code_bench", tmp_path, hub)["live_code_bench"]
    assert "stdin" in reads.prompt[0]["content"]
    assert "def total(self" in calls.prompt[0]["content"]
    double = "```python\nprint(2 * int(input()))\n```"
    total = "```python\nclass Solution:\n    def total(self, some, one):\n        return sum(some) + one\n```"
    assert [judge(reads, double), judge(reads, total), judge(calls, total), judge(calls, double)] == [
        1,
        0,
        1,
        0,
    ]


def test_gsm8k_has_the_number_behind_the_mark(hub: Path) -> None:
    rows = gsm8k(str(hub / "openai/gsm8k"), split="test", instruction="Go.")
    assert dict(rows[1]) == {"prompt": "2 thousand and one? Go.", "answer": "2001"}


READERS: list[Callable[..., Any]] = [gsm8k, gpqa, live_code_bench]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("row", [{"other": 1}, {name: None for rows in ROWS.values() for name in rows[0]}])
def test_a_row_of_another_shape_is_refused(
    read: Callable[..., Any], row: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskError, match=r"has no column|row 0: "):
        read(str(path))[0]


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"options\.source = .*missing.jsonl"):
        gsm8k(str(tmp_path / "missing.jsonl"))
