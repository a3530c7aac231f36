"""Real processes, killed with SIGKILL at moments drawn by a seed: every task still ends once, as in a quiet run.

    launcher ─▸ generators, queue, learner      the test ─▸ Redis
        starts again what dies                      starts it again once the queue waits for it

A moment is a number of leases, commits or steps after the kill before, as the queue's journal tells; the processes are
then wherever they happen to be. What has ended is told twice: by the journal, and by the learner's rows, in which the
reward of each group is the ordinal of its task.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import Process, rows, started, succeeded, summary_of, until
from redis_server import RedisServer
from small_run import BAD, BATCH, TASKS, write_config

from asyncrl.config.load import load_config
from asyncrl.queue.ledger.events import Committed, Leased, Rewound, SteppedBack, StepTrained
from bench.chaos.history import History, JournalReader
from bench.chaos.processes import kill

GOOD = sorted(set(range(TASKS)) - set(BAD))
VERSIONS = -(-len(GOOD) // BATCH)

STORES = {
    "metadata": ("queue.durable=metadata",),
    "payload": ("queue.durable=payload",),
    "redis-payload": ("queue.store=redis", "queue.durable=payload"),
}
ALONE = [("generator",), ("queue",), ("learner",)]
TOGETHER = [("queue", "learner"), ("generator", "queue")]
REDIS = [("redis",), ("redis", "queue")]

LONGEST = {Leased: 20, Committed: 20, StepTrained: 5}
"""Most events of a kind from one kill to the next."""


@dataclass(frozen=True)
class Moment:
    """After `count` more events of kind `of`, all of `parties` die."""

    of: type
    count: int
    parties: tuple[str, ...]


def plan(seed: int, parties: Sequence[tuple[str, ...]]) -> list[Moment]:
    rng = random.Random(seed)
    order = rng.sample(parties, len(parties))
    kinds = [rng.choice(list(LONGEST)) for _ in order]
    return [Moment(of, rng.randint(1, LONGEST[of]), who) for of, who in zip(kinds, order, strict=True)]


class Run:
    """A run under `asyncrl train`, watched through its journal."""

    def __init__(self, config_file: Path, words: Sequence[str], server: RedisServer) -> None:
        self.folder = config_file.parent / "it"
        self._command = ("asyncrl", "train", str(config_file), *words)
        self._server = server
        self._journal = JournalReader(load_config(config_file, list(words)))
        self.history = History()

    def live(self, moments: Sequence[Moment], seed: int) -> None:
        """To its end, through these kills."""
        rng = random.Random(seed)
        with started(*self._command) as launcher:
            for moment in moments:
                self._wait(moment, launcher)
                for party in moment.parties:
                    self._kill(party, launcher, rng)
                if "redis" in moment.parties:
                    self._bring_redis_back(launcher)
            printed = succeeded(launcher)
        assert printed.count("is started again") >= sum(
            party != "redis" for moment in moments for party in moment.parties
        )
        self.history.read(self._journal.new_records())

    def _wait(self, moment: Moment, launcher: Process) -> None:
        goal = self._seen(moment.of) + moment.count
        until(lambda: self._seen(moment.of) >= goal, f"{moment}", launcher)

    def _seen(self, kind: type) -> int:
        self.history.read(self._journal.new_records())
        return self.history.counts[kind]

    def _kill(self, party: str, launcher: Process, rng: random.Random) -> None:
        if party == "redis":
            self._waits = self._times_waited()
            self._server.kill()
        else:
            until(lambda: kill(launcher.pid, party, rng), f"a {party} to kill", launcher)

    def _bring_redis_back(self, launcher: Process) -> None:
        until(
            lambda: self._times_waited() > self._waits, "a queue that says that it waits for Redis", launcher
        )
        self._server.start()

    def _times_waited(self) -> int:
        return (self.folder / "logs" / "queue.log").read_text().count("waiting for Redis")


def assert_all_ended_once(run: Run) -> None:
    history, told = run.history, rows(run.folder)
    assert (history.twice, history.unended) == ([], [])
    assert history.dropped == dict.fromkeys(BAD, "reward")
    assert history.trained == GOOD
    assert [row["version"] for row in told] == list(range(1, VERSIONS + 1))
    for part, power in (("ordinal", 1), ("square", 2)):
        learnt = sum(row[f"rollout/reward/part/{part}"] * row["train/groups"] for row in told)
        assert learnt == pytest.approx(sum(ordinal**power for ordinal in GOOD), rel=1e-6)
    assert max(row["train/staleness/max"] for row in told) <= 2
    summary = summary_of(run.folder)
    assert (summary["versions"], summary["groups_trained"]) == (VERSIONS, len(GOOD))


@pytest.fixture
def config_file(tmp_path: Path, model_folder: Path) -> Path:
    return write_config(tmp_path, model_folder)


@pytest.fixture
def stores(own_redis: RedisServer) -> dict[str, tuple[str, ...]]:
    url = f"queue.redis_url={own_redis.url}"
    return {name: (*words, url) if "redis" in name else words for name, words in STORES.items()}


@pytest.mark.slow
def test_a_quiet_run(config_file: Path, stores: dict[str, tuple[str, ...]], own_redis: RedisServer) -> None:
    """What the others are compared with."""
    run = Run(config_file, stores["metadata"], own_redis)
    run.live([], seed=0)
    assert_all_ended_once(run)


@pytest.mark.parametrize(
    ("store", "seed"),
    [
        ("metadata", 0),
        pytest.param("payload", 1, marks=pytest.mark.slow),
        pytest.param("redis-payload", 3, marks=pytest.mark.slow),
    ],
)
def test_every_task_ends_once(
    config_file: Path, stores: dict[str, tuple[str, ...]], own_redis: RedisServer, store: str, seed: int
) -> None:
    run = Run(config_file, stores[store], own_redis)
    run.live(plan(seed, [*ALONE, *(REDIS if "redis" in store else TOGETHER)]), seed)
    assert_all_ended_once(run)


@pytest.mark.slow
def test_a_learner_that_dies_before_its_first_checkpoint_begins_at_the_beginning(
    config_file: Path, stores: dict[str, tuple[str, ...]], own_redis: RedisServer
) -> None:
    """First the queue still has the steps that it repeats, then they are made again."""
    run = Run(config_file, (*stores["metadata"], "checkpoint.every=100000"), own_redis)
    run.live([Moment(StepTrained, 3, ("learner",)), Moment(StepTrained, 8, ("queue", "learner"))], seed=0)
    assert_all_ended_once(run)
    assert (run.history.counts[SteppedBack], run.history.counts[Rewound]) == (1, 1)
