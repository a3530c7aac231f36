"""`asyncrl train` whose processes die, or whose disk is full, at any of their calls to the run folder.

    a call of one party ─▸ kill -9, or a full disk ─▸ it is started again, or the run ends by name and is resumed

However it went, the run has trained each task once, and its files can be read at any moment.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_calls import FULL, KILL, TORN, Watch
from processes import finished, rows, started, succeeded, summary_of, versions

from asyncrl.config.load import load_config
from asyncrl.launch.folder.run_folder import read_summary
from asyncrl.learner import checkpoint
from asyncrl.telemetry.sinks import read_rows
from bench.chaos.history import History, JournalReader

VERSIONS, GROUPS = 6, 4

CODE = """
def reward(task, text):
    return {"ordinal": float(task.ordinal), "square": float(task.ordinal) ** 2}
"""

CONFIG = """
run: {{name: it, dir: {folder}, versions: 6, seed: 3}}
model: {{path: {model}}}
tasks: {{source: asyncrl.tasks.addition:train, options: {{digits: 1, held_out: 20}}}}
reward: {{function: "{folder}/code.py:reward"}}
batch: {{groups: 4, group_size: 2}}
generator: {{slots: 16, max_tokens: 4, max_length: 16, threads: 1, heartbeat_s: 0.2}}
queue: {{max_staleness: 2, lease_s: 3, durable: payload, fsync: true}}
learner: {{threads: 1, micro_batch_tokens: 128, groups_deadline_s: 60}}
checkpoint: {{every: 2}}
telemetry: {{rollouts_every: 1}}
launch: {{quiet: true}}
"""


class WatchedRun:
    """A run in a folder of its own, with a fault at the `at`-th call of a party at this place (see `Watch`)."""

    def __init__(
        self, home: Path, model: Path, party: str, place: str = "", fault: str = "", at: int = -1
    ) -> None:
        (home / "notes").mkdir(parents=True)
        (home / "code.py").write_text(CODE, encoding="utf-8")
        self.folder, self._config = home / "it", home / "config.yaml"
        self._config.write_text(CONFIG.format(folder=home, model=model), encoding="utf-8")
        self.watch = Watch(str(self.folder), str(home / "notes"), party, place, fault, at)

    def live(self) -> None:
        """To its end, with room on the disk again, if the fault has ended it."""
        command = ("asyncrl", "train", str(self._config))
        with started(*command, env=self.watch.variables) as launcher:
            code, printed = finished(launcher)
        assert code in self._codes(), printed
        self._assert_readable()
        self.watch.full.unlink(missing_ok=True)
        if code != 0:
            with started(*command, "run.resume=true") as launcher:
                succeeded(launcher)
        self._assert_trained_once()

    def _codes(self) -> set[int]:
        """How the launcher may end."""
        if self.watch.fault == FULL:
            return {0, 9}
        if self.watch.party == "queue":
            return {0, 5}  # before it has an address it is not started again
        return {-9} if self.watch.party == "train" and self.watch.fault else {0}

    def _assert_readable(self) -> None:
        """Whatever of the run's files is there is whole, and so is its newest checkpoint."""
        if (self.folder / "config.yaml").exists():
            load_config(self.folder / "config.yaml")
        read_summary(self.folder)
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            list(read_rows(self.folder / name))
        saved = checkpoint.to_resume(self.folder)
        assert (saved is not None) == any(self.folder.glob("checkpoints/v*"))

    def _assert_trained_once(self) -> None:
        history = History()
        history.read(JournalReader(load_config(self._config)).new_records())
        told = rows(self.folder)
        assert versions(self.folder) == list(range(1, VERSIONS + 1))
        assert summary_of(self.folder)["groups_trained"] == VERSIONS * GROUPS
        if self.watch.party in ("queue", "train") and not history.trained:
            return  # killed after the learner had closed the run: the next queue has begun anew
        assert (history.twice, history.unended) == ([], [])
        assert len(history.trained) == VERSIONS * GROUPS
        assert set(history.dropped.values()) <= {"end"}
        for part, power in (("ordinal", 1), ("square", 2)):
            learnt = sum(row[f"rollout/reward/part/{part}"] * row["train/groups"] for row in told)
            assert learnt == pytest.approx(sum(ordinal**power for ordinal in history.trained))


@pytest.mark.parametrize(
    ("party", "place", "fault", "at"),
    [
        ("train", "rename .config.yaml", KILL, 0),
        ("learner", r"rename checkpoints/.v\d+.partial$", KILL, 1),
        ("learner", r"write checkpoints/.v\d+.partial/learner/__", FULL, 9),
    ],
)
def test_each_task_is_trained_once(
    tmp_path: Path, model_folder: Path, party: str, place: str, fault: str, at: int
) -> None:
    run = WatchedRun(tmp_path, model_folder, party, place, fault, at)
    run.live()
    assert run.watch.struck.exists()


def fault_of(call: str, number: int) -> str:
    """Those that the call can have, by turns."""
    faults = {"write": [TORN, FULL], "open": [KILL, FULL], "mkdir": [FULL, KILL]}.get(call.split()[0], [KILL])
    return faults[number % len(faults)]


def places(calls: list[str]) -> Iterator[tuple[str, int]]:
    """Each place of these calls, as an expression in which all numbers are alike, and how often it was called."""
    return iter(Counter(re.sub(r"\\?\d+", r"\\d+", re.escape(call)) for call in calls).items())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("party", ["train", "queue", "learner", "generator"])
def test_each_task_is_trained_once_whichever_call_fails(
    tmp_path: Path, model_folder: Path, party: str
) -> None:
    """At every eighth place of its calls: those of checkpoints, of the run folder and of the journal are all tried in
    tests of their own."""
    quiet = WatchedRun(tmp_path / "quiet", model_folder, party)
    quiet.live()
    failed = []
    for number, (place, count) in enumerate([*places(quiet.watch.calls())][::8]):
        fault, home = fault_of(place, number), tmp_path / f"run-{number}"
        run = WatchedRun(home, model_folder, party, f"{place}$", fault, count // 2)
        try:
            run.live()
        except AssertionError as error:
            failed.append(f"{home.name}: {fault} of {party} at {place}, call {count // 2}: {error}")
    assert not failed, "\n\n".join(failed)
