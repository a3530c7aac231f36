"""Asynchronous runs of several processes, some of them killed, made again in one: weights equal to the last bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from own_functions import LENGTH
from processes import child, finished, newest_checkpoint, ran, started, until, until_trained, versions

from asyncrl.telemetry.decisions import TrainedVersion, read_lives

KEYS = (LENGTH, "generator.count=2", "checkpoint.every=2", "run.versions=100000")


def run_keys(staleness: int) -> tuple[str, ...]:
    return (*KEYS, f"queue.max_staleness={staleness}")


def trained(run: Path) -> list[TrainedVersion]:
    """All steps of all lives of the learner."""
    items = [item for life in read_lives(run / "decisions") for item in life.items]
    return [TrainedVersion.from_wire(item) for item in items if item[0] == "trained"]


def lives_of(run: Path, process: str) -> list[int]:
    """Numbers of the lives of this process that have recorded something."""
    files = sorted((run / "decisions").glob(f"{process}.*.msgpack"))
    return [int(file.name.split(".")[1]) for file in files if file.stat().st_size]


def assert_made_again(run: Path, *words: str) -> str:
    """The last weights, which all differ from each other; a step that was made twice has the same."""
    steps = trained(run)
    assert len({step.weights for step in steps}) == len({step.version for step in steps}) >= 6
    printed = ran("asyncrl", "replay", str(run), *words)
    lines = re.findall(r"version (\d+): (\d+) groups, weights (\w+) as recorded", printed)
    assert [(int(version), int(groups), weights) for version, groups, weights in lines] == [
        (step.version, sum(map(len, step.claims)), f"{step.weights:016x}") for step in steps
    ]
    return printed


def test_a_run_with_a_killed_generator(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started("asyncrl", "train", str(config_file), *run_keys(2)) as launcher:
        until(lambda: lives_of(run, "generator-0") == [0], "decisions of the generator", launcher)
        until_trained(run, 3, launcher)
        child(launcher, "generator-0").kill()
        until(lambda: lives_of(run, "generator-0") == [0, 1], "decisions of its second life", launcher)
        until_trained(run, 6, launcher)
        launcher.terminate()
        assert finished(launcher)[0] == 10
    assert_made_again(run)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 8])
def test_a_run_with_killed_processes_that_was_resumed(config_file: Path, staleness: int) -> None:
    run, keys = config_file.parent / "it", run_keys(staleness)
    with started("asyncrl", "train", str(config_file), *keys) as launcher:
        until(lambda: newest_checkpoint(run) >= 2, "a checkpoint to go on from", launcher)
        child(launcher, "generator-1").kill()
        until_trained(run, 5, launcher)
        child(launcher, "asyncrl", "learner").kill()
        until(lambda: lives_of(run, "learner") == [0, 1], "decisions of its second life", launcher)
        until_trained(run, versions(run)[-1] + 4, launcher)
        launcher.terminate()
        assert finished(launcher)[0] == 10
    goal = newest_checkpoint(run) + 3
    ran("asyncrl", "train", str(config_file), *keys, "run.resume=true", f"run.versions={goal}")
    lives = read_lives(run / "decisions")
    assert len([life for life in lives if life.role == "learner"]) == 3
    printed = assert_made_again(run, "algorithm.loss=gspo")
    assert f"{run}/what_if/algorithm.loss=gspo" in printed
    assert (run / "what_if" / "algorithm.loss=gspo" / "final" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ("generator.kv=recompute", "learner.mini_batches=2", "learner.epochs=2", "algorithm.advantage=gae"),
        ("generator.kv=drain", "model.lora.rank=4"),
        ("generator.progress_tokens=2", "generator.slots=8"),
        ("generator.speculation.tokens=8", "generator.slots=8", "generator.quantization=fp8"),
        ("run.versions=30", "tasks.curriculum.solved=0", "tasks.curriculum.revisit=0.5"),  # 80 tasks
    ],
)
def test_a_run_of_another_kind(config_file: Path, keys: tuple[str, ...]) -> None:
    run = config_file.parent / "it"
    ran("asyncrl", "train", str(config_file), *run_keys(2), "run.versions=6", *keys)
    assert_made_again(run)


@pytest.mark.slow
def test_the_learner_alone_from_saved_groups_of_any_engine(config_file: Path) -> None:
    run = config_file.parent / "it"
    keys = (
        "generator.engine=scripted",
        "telemetry.groups_every=1",
        "run.versions=6",
        "algorithm.filter=none",
    )
    ran("asyncrl", "train", str(config_file), *run_keys(2), *keys)
    with started("asyncrl", "replay", str(run)) as process:
        code, printed = finished(process)
    assert code == 2
    assert "only the embedded engine makes the same tokens again" in printed
    assert_made_again(run, "--saved-groups")


@pytest.mark.slow
def test_synchronous_runs_are_alike_until_a_rule_differs(config_file: Path) -> None:
    shared = (*run_keys(0), "run.versions=3", "evaluation.source=null", "telemetry.groups_every=1")
    for name, keys in {"one": (), "two": (), "warmer": ("generator.temperature=1.01",)}.items():
        ran("asyncrl", "train", str(config_file), *shared, f"run.name={name}", *keys)
    one, two, warmer = (str(config_file.parent / name) for name in ("one", "two", "warmer"))
    assert f"{one} and {two} are alike" in ran("asyncrl", "bisect", one, two)
    with started("asyncrl", "bisect", one, warmer) as process:
        code, printed = finished(process)
    assert code == 13
    assert "groups, after 0 steps that are alike: for version 1 the groups of task 0 differ: " in printed
    assert re.search(r"(token_ids|logprobs) of rollout \d, token \d+: ", printed)
