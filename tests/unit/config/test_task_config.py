from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.commented_yaml import key_comments, render
from asyncrl.config.load import load_config, save_config
from asyncrl.errors import ConfigError
from asyncrl.tasks.source import training_tasks

BASE = """\
model: {path: some/model}
reward: {function: "some.module:reward"}
tasks:
  mixture:
    math: {source: math.jsonl, weight: 2, fields: {answer: solution}}
    code: {source: code.jsonl, system: be brief}
evaluation:
  source: heldout.jsonl
  sets:
    hard: {source: hard.jsonl, samples: 4, temperature: 1, top_p: 0.9}
"""


def test_entries_have_the_keys_of_their_section_and_its_defaults(base: Path) -> None:
    config = load_config(base, ["tasks.mixture.math.weight=3", "evaluation.sets.hard.samples=8"])
    math, code = config.tasks.sources["math"], config.tasks.sources["code"]
    assert (math.weight, math.fields, math.system, math.prompt_key) == (
        3.0,
        {"answer": "solution"},
        None,
        "prompt",
    )
    assert (code.weight, code.fields, code.system) == (1.0, {}, "be brief")
    main, hard = config.evaluation.named_sets.values()
    assert list(config.evaluation.named_sets) == ["", "hard"]
    assert (main.samples, main.temperature) == (1, 0.0)
    assert (hard.samples, hard.temperature, hard.top_p, hard.max_tokens) == (8, 1.0, 0.9, None)


def test_entries_are_printed_and_read_back(base: Path, tmp_path: Path) -> None:
    config = load_config(base)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    assert "sets: {hard: {source: hard.jsonl, samples: 4" in render(config)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("tasks.mixture.math.wieght=3", r"tasks\.mixture\.math\.wieght = 3: .*did you mean .*weight\?"),
        ("tasks.mixture.math.weight=0", r"tasks\.mixture\.math\.weight = 0\.0: must be above 0"),
        ("tasks.mixture.math.weight=.inf", r"tasks\.mixture\.math\.weight = inf: must be a finite number"),
        ("tasks.mixture.math.weight=much", r"tasks\.mixture\.math\.weight = 'much'"),
        ("tasks.mixture.x={weight: 1}", r"tasks\.mixture\.x\.source = None: names no tasks"),
        ("tasks.mixture.x=3", r"tasks\.mixture\.x = 3: must hold keys"),
        ("tasks.source=a.jsonl", r"tasks\.source = 'a\.jsonl': stands beside tasks\.mixture"),
        ("tasks.max_prompt_tokens=0", r"tasks\.max_prompt_tokens = 0"),
        ("evaluation.sets.hard.temperature=0", r"evaluation\.sets\.hard\.samples = 4: .*greedy"),
        ("evaluation.sets.hard.temperature=-1", r"evaluation\.sets\.hard\.temperature = -1\.0"),
        ("evaluation.sets.hard.top_p=2", r"evaluation\.sets\.hard\.top_p = 2\.0"),
        ("evaluation.sets.hard.max_tokens=0", r"evaluation\.sets\.hard\.max_tokens = 0"),
        (
            "evaluation.sets.hard.samples=1000",
            r"evaluation\.sets\.hard\.samples = 1000: .*generator\.slots=256",
        ),
        ("evaluation.sets.a/b={source: x}", r"evaluation\.sets\.a/b"),
        ("evaluation.sets={'': {source: x}}", r"evaluation\.sets = ''"),
        ("evaluation.samples=2", r"evaluation\.samples = 2: .*set evaluation\.temperature=1"),
        ("evaluation.source=null run.target_accuracy=0.5", r"run\.target_accuracy = 0\.5"),
    ],
)
def test_what_an_entry_cannot_be(base: Path, word: str, says: str) -> None:
    words = [word] if "={" in word else word.split(" ")
    with pytest.raises(ConfigError, match=f"^{says}"):
        load_config(base, words)


def test_a_run_without_tasks_is_told_so(base: Path) -> None:
    base.write_text("\n".join(BASE.splitlines()[:2]))
    with pytest.raises(ConfigError, match=r"^tasks\.source = None: names no tasks"):
        training_tasks(load_config(base))


def test_keys_of_the_sections_above_have_comments_too() -> None:
    assert key_comments()["tasks.prompt_key"] == key_comments()["evaluation.prompt_key"] != ""
    assert "fmt:" not in "".join(key_comments().values())
