"""The JSON Schema of configurations: takes all that are in the project, and marks mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.config.commented_yaml import key_comments
from asyncrl.config.json_schema import schema
from asyncrl.config.load import all_keys
from asyncrl.config.yaml_values import parse_yaml

jsonschema = pytest.importorskip("jsonschema")

PROJECT = Path(__file__).parents[3]
FILES = sorted([*(PROJECT / "configs").rglob("*.yaml"), *(PROJECT / "examples").rglob("*.yaml")])


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft7Validator.check_schema(schema())
    return jsonschema.Draft7Validator(schema())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_configuration_of_the_project_is_valid(validator: Any, path: Path) -> None:
    assert [error.message for error in validator.iter_errors(parse_yaml(path.read_text()))] == []


@pytest.mark.parametrize(
    "text",
    [
        "bacth: {groups: 8}",
        "batch: {group: 8}",
        "batch: {groups: 0}",
        "queue: {lease_s: -1}",
        "algorithm: {advantage: grpoo}",
        "learner: {optimizer: {betas: [0.9, 1]}}",
        "run: {resume: perhaps}",
        "reward: {functions: {right: {functon: m:f}}}",
        "evaluation: {sets: {math: {sorce: a.jsonl}}}",
        "reward: {weights: {cost: much}}",
        "placement: {generators: {small: {slots: 0}}}",
        "placement: {generators: {small: {temperature: 0.5}}}",
    ],
)
def test_a_mistake_is_marked(validator: Any, text: str) -> None:
    assert not validator.is_valid(parse_yaml(text))


@pytest.mark.parametrize(
    "text",
    [
        "run: {name: '${oc.env:USER}', seed: '${run.versions}'}",
        "critic:",
        "run: {name: 12}",
        "include: a.yaml",
        "placement: {generators: {small: {slots: 4, vllm: {tensor_parallel: 2}}, old: null}}",
    ],
)
def test_what_load_config_takes_is_not(validator: Any, text: str) -> None:
    validator.validate(parse_yaml(text))


def test_the_command_prints_it_with_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for key in all_keys():
        *outer, name = key.split(".")
        section = printed
        for part in outer:
            section = section["properties"][part]
        assert section["properties"][name].get("description") or key in WITHOUT_COMMENT


WITHOUT_COMMENT = set(all_keys()) - key_comments().keys()
