"""A learner under SIGKILL around its checkpoints: what it repeats has the same weights, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from own_functions import LENGTH
from processes import Process, queue_address, started, succeeded, until, until_trained, versions

pytestmark = pytest.mark.slow

VERSIONS = 9
MOMENTS = [("claim", 3), ("copy", 4), ("write", 6), ("commit", 8)]
"""Checkpoints are made every 2 versions."""

SCRIPT = str(Path(__file__).parents[1].joinpath("killed_learner.py"))


class Run:
    """A run taken apart, whose learner is started again and again on the same queue and generator."""

    def __init__(self, config_file: Path, name: str, staleness: int, ranks: int) -> None:
        self.folder, self.notes = config_file.parent / name, config_file.parent / f"{name}-notes"
        self.notes.mkdir()
        self._config, self._ranks = str(config_file), ranks
        self._words = [
            f"run.name={name}",
            f"run.versions={VERSIONS}",
            f"queue.max_staleness={staleness}",
            "evaluation.source=null",
            "checkpoint.every=2",
            LENGTH,
        ]

    @contextmanager
    def others(self) -> Iterator[str]:
        """Queue and generator; the queue's address."""
        with started("asyncrl", "queue", self._config, *self._words) as queue:
            address = queue_address(self.folder, queue)
            with started("asyncrl", "generator", self._config, address, "--name", "it", *self._words):
                yield address

    @contextmanager
    def learner(self, address: str, moment: str, version: int, resume: bool) -> Iterator[Process]:
        words = [SCRIPT, str(self.notes), moment, str(version), "learner", self._config, address]
        words += [*self._words, f"run.resume={str(resume).lower()}", f"learner.processes={self._ranks}"]
        with started(*words) as learner:
            yield learner

    def live(self, moments: Sequence[tuple[str, int]]) -> None:
        """To its end, killed at each of these."""
        with self.others() as address:
            for number, (moment, version) in enumerate(moments):
                with self.learner(address, moment, version, resume=number > 0) as learner:
                    until((self.notes / "standing").exists, f"moment {moment}", learner)
                    if moment == "write":  # training goes on meanwhile
                        until_trained(self.folder, version + 1, learner)
                    learner.kill()
                    learner.wait()
                (self.notes / "standing").unlink()
            with self.learner(address, "never", 0, resume=bool(moments)) as learner:
                succeeded(learner)
        assert versions(self.folder) == list(range(1, VERSIONS + 1))

    def lives(self, rank: int = 0) -> list[dict[int, str]]:
        """The hash of each version that a rank published, life by life."""
        lives: list[dict[int, str]] = []
        for line in (self.notes / f"hashes{rank}.jsonl").read_text().splitlines():
            row = json.loads(line)
            if not lives or row["version"] != max(lives[-1]) + 1:
                lives.append({})
            lives[-1][row["version"]] = row["hash"]
        return lives


def assert_repeated(lives: list[dict[int, str]]) -> dict[int, str]:
    """Every life began at the newest whole checkpoint, and made again what was made before. Returns the hash of each
    version."""
    assert len(lives) == len(MOMENTS) + 1
    starts = [min(life) for life in lives]
    assert starts[1] in (0, 2)  # killed in the step from 3, when the disk may have had 2 or not
    assert [starts[0], *starts[2:]] == [0, 2, 4, 8]
    assert max(lives[2]) >= 7  # trained on while checkpoint 6 was written
    made = {version: {life[version] for life in lives if version in life} for version in range(VERSIONS + 1)}
    assert {version: len(hashes) for version, hashes in made.items()} == dict.fromkeys(made, 1)
    hashes = {version: hash for version, (hash,) in made.items()}
    assert len(set(hashes.values())) == VERSIONS + 1  # every step moves the weights
    return hashes


def test_a_synchronous_run_under_kills_has_the_weights_of_one_that_was_left_alone(config_file: Path) -> None:
    calm = Run(config_file, "calm", staleness=0, ranks=1)
    calm.live([])
    killed = Run(config_file, "killed", staleness=0, ranks=1)
    killed.live(MOMENTS)
    assert [assert_repeated(killed.lives())] == calm.lives()


def test_two_ranks_that_run_ahead_repeat_their_steps_bit_for_bit(config_file: Path) -> None:
    run = Run(config_file, "ahead", staleness=2, ranks=2)
    run.live(MOMENTS)
    for rank in range(2):
        assert_repeated(run.lives(rank))
