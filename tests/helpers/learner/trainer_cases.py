"""A trainer with an in-memory queue and publisher around it, for tests of what it does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from learner_cases import random_group, rollout, tiny_model

from asyncrl.config.schema import CheckpointConfig, Config, QueueConfig, RunConfig
from asyncrl.config.sections.tasks import MAIN
from asyncrl.device.turns import DeviceTurn
from asyncrl.errors import RefusedError
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.checkpoint import Checkpoints, to_resume
from asyncrl.learner.startup import open_trainer
from asyncrl.learner.training import requirements
from asyncrl.queue.protocol.replies import Claim, Opened, Trained
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.telemetry.sinks import read_rows
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Group, Sampling, Task

HELDOUT = {MAIN: 3}
Make = Callable[[int], Group]


@dataclass
class FakeQueue:
    """Hands out groups 0, 1, 2, … one a claim, and answers an evaluation at once: accuracy is
    `accuracy[version]`.

    `script` sees every call first and may answer it itself.
    """

    make: Make = random_group
    dry_from: int = 1 << 30  # the first ordinal that never comes
    accuracy: Mapping[int, float] = field(default_factory=dict)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    on_claim: Callable[[int, int], None] = lambda step, index: None
    first: int = 0
    batch: int = 2
    even_tokens: float | None = None
    rejected: int = 0
    dropped: list[int] = field(default_factory=list)  # rising
    evals: list[Group] = field(default_factory=list)
    eval_tasks: int = 0
    ahead: bool = True  # whether a step's first claim comes while the one before runs
    version: int | None = None  # of the running step, once one was claimed
    moved: threading.Condition = field(default_factory=threading.Condition)

    def post(self, key: str, value: Any) -> None:
        self.calls.append(("post", key))

    def open(self, stream: str, settings: StreamSettings, snapshot: bytes | None = None) -> Opened:
        self.calls.append(("open", (stream, snapshot)))
        if stream == "train":
            self.batch, self.even_tokens = settings.groups_per_version, settings.even_tokens
        return Opened(learner_epoch=7, lineage=1 if snapshot else 0, version=0)

    def claim(
        self,
        stream: str,
        *,
        step: int,
        index: int,
        wait_s: float,
        attempt: int | None,
        received: int,
        ahead: bool,
        **_: Any,
    ) -> Claim | None:
        """That of a later step waits, but for the first claim of the next one if they come `ahead`."""
        with self.moved:
            self.version = step if self.version is None else self.version
            early = self.ahead and ahead and step == self.version + 1
            if not early and not self.moved.wait_for(lambda: step <= (self.version or 0), wait_s):
                return None
        if not received:
            self.on_claim(step, index)
        ordinal = step * self.batch + index + self.rejected
        for dropped in self.dropped:
            ordinal += dropped <= ordinal
        if ordinal >= self.dry_from:
            return None
        last, now = index == self.batch - 1, len(self.of("abandon"))
        if attempt not in (None, now):
            raise RefusedError("abandoned", f"step {step} has begun anew")
        groups, workers = [self.make(ordinal)][received:], ["worker g0"][received:]
        return Claim(groups, last, index + 1, now, early, [ordinal], workers=workers)

    def trained(self, stream: str, *, learner_epoch: int, step: int, waited: float | None = None) -> Trained:
        assert waited is not None
        assert 0 <= waited <= 1
        self.calls.append(("trained", step))
        with self.moved:
            self.version = step + 1
            self.moved.notify_all()
        stats = {
            "g0": {
                "tokens": 100 * (step + 1),
                "seconds": {"compute": 3.0 * (step + 1), "wait/tasks": 1.0 * (step + 1)},
                "weights/flips": step,
                "held": step,
                "weights/pauses_ms": [2.0],
                "weights/fetches_ms": [30.0],
                "weights/floor_ms": 1.5,
            }
        }
        return Trained(step + 1, stats, {"ready": 5, "dropped": 1, "dropped_by_reason": {"reward": 1}})

    def reject(self, stream: str, *, learner_epoch: int, step: int, reason: str) -> int:
        self.calls.append(("reject", (step, reason)))
        self.rejected += self.batch
        return self.batch

    def abandon(
        self, stream: str, *, learner_epoch: int, step: int, attempt: int, dropped: Sequence[int], reason: str
    ) -> int:
        assert attempt == len(self.of("abandon"))
        self.calls.append(("abandon", (step, list(dropped), reason)))
        self.dropped = sorted({*self.dropped, *dropped})
        return attempt + 1

    def room(self, stream: str, wait_s: float) -> tuple[int, int]:
        return self.eval_tasks, 8

    def submit(self, stream: str, tasks: Sequence[Task], min_version: int = 0) -> None:
        for task in tasks:
            assert task.ordinal == self.eval_tasks
            self.eval_tasks += 1
            start, stop = task.data["start"], task.data["stop"]
            reward = self.accuracy.get(min_version, 0.0)
            rollouts = [rollout([1, 2], 1, reward=reward, version=min_version) for _ in range(start, stop)]
            self.evals.append(Group.from_rollouts(task, Sampling(temperature=0.0), rollouts))

    def collect(self, stream: str, *, learner_epoch: int, wait_s: float) -> list[Group]:
        done, self.evals = self.evals, []
        return done

    def snapshot(self, stream: str, *, learner_epoch: int) -> bytes:
        return f"{stream} after {sum(name == 'trained' for name, _ in self.calls)}".encode()

    def status(self) -> Mapping[str, Any]:
        counts = {"pending": 3, "leased": 1, "ready": 0, "trained": 0}
        train = {**counts, "dropped_by_reason": {"reward": 2, "filtered": 40}}
        return {"streams": {"train": train}, "workers": {}}

    def checkpointed(self, stream: str, *, learner_epoch: int, version: int) -> None:
        self.calls.append(("checkpointed", (stream, version)))

    def finish(self, reason: str) -> None:
        self.calls.append(("finish", reason))

    def of(self, name: str) -> list[Any]:
        return [value for called, value in self.calls if called == name]


@dataclass(frozen=True)
class FakePublished:
    pause_s: float
    floor_s: float


@dataclass
class FakePublisher:
    """Remembers what was published, weights and all."""

    live: Mapping[str, torch.Tensor]
    endpoint: str = "tcp://127.0.0.1:1"
    published: dict[int, torch.Tensor] = field(default_factory=dict)
    closed: bool = False

    def publish(self, version: int) -> FakePublished:
        assert version not in self.published
        self.published[version] = torch.cat([t.flatten().clone() for t in self.live.values()])
        return FakePublished(pause_s=0.003, floor_s=0.001)

    def stats(self) -> dict[str, float]:
        return {"lag": 1}

    def close(self, wait_s: float) -> None:
        self.closed = True


class FakeStream:
    """The train stream of a learner that trains nothing."""

    def checkpointed(self, version: int) -> None:
        """Not noted."""


def checkpoints_of(
    folder: Path, backend: Any, remote_models: Any = (), fsync: bool = False, **settings: Any
) -> Checkpoints:
    """folder: of the run · settings: of `checkpoint`"""
    config = Config(
        run=RunConfig(dir=str(folder.parent), name=folder.name),
        checkpoint=CheckpointConfig(**settings),
        queue=QueueConfig(fsync=fsync),
    )
    stream: Any = FakeStream()
    return Checkpoints(config, backend, stream, Spans(), remote_models, None, None)


def newest(run_folder: Path) -> Path | None:
    """The folder of the newest whole checkpoint."""
    found = to_resume(run_folder)
    return None if found is None else found[0]


class Case:
    """One trainer and its neighbours."""

    def __init__(self, config: Config, queue: FakeQueue, heldout: Mapping[str, int] = HELDOUT) -> None:
        tiny_model(Path(config.model.path))
        self.folder = Path(config.run.dir) / config.run.name
        self.queue, self.backend = queue, FsdpBackend(config, requirements.models(config))
        self.publisher = FakePublisher(self.backend.local_tensors())
        self.stop = threading.Event()
        self.trainer = open_trainer(
            config,
            self.backend,
            queue,  # type: ignore[arg-type]
            lambda _: self.publisher,  # type: ignore[arg-type,return-value]
            keys=None,
            stop=self.stop,
            heldout=heldout,
            status=ProcessStatus(),
            turn=DeviceTurn.always(),
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(read_rows(self.folder / "metrics.jsonl"))

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()))
