"""The sections `run`, `batch`, `checkpoint`, `telemetry` and `launch`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.config.rules import (
    Amount,
    Count,
    NotNegative,
    Rule,
    Seconds,
    Section,
    Seed,
    key,
    name_rule,
)

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True)
class RunConfig(Section):
    name: str = key("run", "names the run folder, and keeps clients of another run out")
    dir: str = key("runs", "the run folder is dir/name", home=True)
    seed: Seed = key(0, "fixes task order, sampling and initialisation")
    versions: Count = key(100, "policies to publish, then the run ends")
    resume: bool = key(False, "go on from the newest checkpoint of the run folder")
    resume_changed: bool = key(False, "let it go on with other tasks, another seed or another model.path")
    target_accuracy: float | None = key(None, "end early once the held-out accuracy reaches this")

    def rules(self, at: str) -> Iterator[Rule]:
        yield name_rule("name", self.name)
        yield Rule(bool(self.dir), "dir", "names no folder", "set run.dir=runs")
        yield Rule(
            not self.dir.startswith("~"),
            "dir",
            "begins with ~, and there is no such user",
            "write the whole path, or ./~… for that name",
        )


@dataclass(frozen=True)
class BatchConfig(Section):
    groups: Count = key(64, "B: groups that one version is trained on")
    group_size: Count = key(8, "n: rollouts of one task")


@dataclass(frozen=True)
class CheckpointConfig(Section):
    every: Count = key(50, "versions between checkpoints; the last version is always saved")
    keep: Count = key(2, "newest checkpoints that stay on disk")
    asynchronous: bool = key(
        True, "train on while one is written; costs a copy of masters and moments in CPU memory"
    )
    deadline_s: Seconds = key(600.0, "longest that anybody waits for one to be written")


@dataclass(frozen=True)
class TelemetryConfig(Section):
    rollouts_every: Amount = key(
        10,
        "versions between those of which rollouts.jsonl has a few rollouts, as text; the first version is "
        "always one of them; 0: none",
    )
    groups_every: Amount = key(
        0,
        "versions between those whose groups are all written to groups/, for `asyncrl retrain`; 0: only groups with "
        "numbers that are not finite",
    )
    trackers: tuple[str, ...] = key(
        (), "packages that get rows and rollouts beside the files: tensorboard, wandb, mlflow, trackio"
    )
    project: str | None = key(
        None, "of the run in trackers, an experiment in MLflow; null: that of their variables, else asyncrl"
    )
    group: str | None = key(None, "of the run among those of its project, in trackers that have groups")
    tags: tuple[str, ...] = key((), "of the run in trackers that have tags")
    notes: str | None = key(None, "text about the run in trackers that have notes")
    prometheus_port: Amount | None = key(
        None,
        "where each process serves its figures for Prometheus: the first free port from here on; 0: any; null: nowhere",
    )
    prometheus_host: str = key(
        "127.0.0.1", "the address of that; 0.0.0.0: readable by every machine that reaches this one"
    )
    trace_mb: Amount = key(
        64, "most megabytes of the trace of each process, whose oldest part is removed; 0: no traces"
    )

    decisions: bool = key(
        True,
        "record what each process decides, in decisions/, so that `asyncrl replay` can make the run again",
    )

    def rules(self, at: str) -> Iterator[Rule]:
        for name in self.trackers:
            yield Rule(
                name in TRACKERS,
                "trackers",
                "is no tracker; metrics.jsonl is always written",
                f"choose from {', '.join(TRACKERS)}",
                name,
            )
        yield Rule(
            len(set(self.trackers)) == len(self.trackers),
            "trackers",
            "names a tracker twice",
            "take one out",
            list(self.trackers),
        )


@dataclass(frozen=True)
class LaunchConfig(Section):
    """Only for processes that start others: `asyncrl train`, and a learner or pool of several ranks."""

    generator_restarts: Amount = key(
        3,
        "how often each generator that dies is started again within restart_window_s; one that dies more often is "
        "left out until that time has passed, and the run ends once all are",
    )
    queue_restarts: Amount = key(
        3, "how often a queue that dies is started again within restart_window_s, from its journal"
    )
    pool_restarts: Amount = key(
        3,
        "how often processes of pools that die are started again within restart_window_s, all of them together",
    )
    learner_restarts: Amount = key(
        3,
        "how often a learner that dies is started again within restart_window_s, from the newest checkpoint",
    )
    restart_window_s: Seconds = key(3600.0, "the time in which restarts are counted")
    restart_pause_s: NotNegative = key(
        1.0,
        "before the second restart of a process within restart_window_s; doubled before each further one, up to 30 s",
    )
    start_deadline_s: Seconds = key(
        120.0,
        "until the queue listens, and until torch is imported for `fork`; on a Ray cluster also until there is room "
        "for all processes",
    )
    load_deadline_s: Seconds = key(3600.0, "until the learner has loaded its models")
    stop_deadline_s: Seconds = key(
        30.0, "for a clean end after Ctrl-C or the last version: longer than one version trains"
    )
    rank_deadline_s: Seconds = key(
        60.0,
        "longest silence of a rank of several, e.g. stopped by SIGSTOP, before it is killed; of a machine with ranks "
        "(queue.deadline_s at least), before those of the other machines end",
    )
    fork: bool = key(
        True,
        "fork processes from one that has imported torch, on Linux: the run starts sooner, and restarts take a second; "
        "false: each of them imports it",
    )
    timings: bool = key(
        False, "print what each stage of the start took, once the first version is trained; from the traces"
    )
    quiet: bool = key(False, "no live table")
    dash: bool = key(
        False, "serve the run's page for browsers on loopback, as `asyncrl dash`, and print its address"
    )
