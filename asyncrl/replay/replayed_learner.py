"""All lives of the learner, made again: the run's own version step, on the recorded groups in the recorded order.

    decisions ── begun, trained, saved ──▸ VersionStep ──▸ weights ──▸ WeightStore
                          │                    ▴              └─ hash ─▸ as recorded?
          GroupStore ◂────┘ ───── groups ──────┘

A life that began from a checkpoint begins from the state that this replay had there, not from the run's file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import Config
from asyncrl.errors import DivergedError
from asyncrl.learner.process import open_rank
from asyncrl.learner.reporting.version_decisions import NORM, live_weights, weights_hash
from asyncrl.learner.training.version_step import VersionReport, version_step
from asyncrl.replay.stores import GroupStore, Published, WeightStore
from asyncrl.telemetry.decisions import ClaimedGroup, Life, TrainedVersion
from asyncrl.types import Group, Version

STATE, CONTROLS = "learner", "controls.json"


@dataclass(frozen=True, slots=True)
class Replayed:
    """A version that was made again.

    weights    a hash of them
    report     of its step
    otherwise  the report of the same step by other rules, if there are some
    """

    recorded: TrainedVersion
    lineage: int
    weights: int
    report: VersionReport
    otherwise: VersionReport | None = None

    @property
    def same(self) -> bool:
        return self.weights == self.recorded.weights

    @property
    def difference(self) -> str:
        """The first difference, for errors; the groups are the recorded ones."""
        norm, recorded = self.report.values.get(NORM, 0.0), self.recorded.norm
        if norm != recorded:
            return f"the gradient norm is {norm!r}, and was {recorded!r}"
        hashes = f"{self.weights:016x}, not {self.recorded.weights:016x}"
        return f"the gradient norm is the recorded one, and the weights hash to {hashes}"


class OpenLearner:
    """The backend and the version step of one life. Raises ConfigError as `open_rank`.

    state: a folder of `save` to begin from; None: the weights of the run's first version
    """

    def __init__(self, config: Config, state: Path | None) -> None:
        self.backend = open_rank(config)
        # The run has compared log-probs; here, versions of former lives and other rules would differ.
        self._step, self._config = version_step(self.backend, config, gated=False), config
        if state is not None:
            self.backend.load(state / STATE)
            controls = json.loads((state / CONTROLS).read_text())
            self._step.controls = self._step.controls.restored(controls, config.algorithm)

    def train(self, claims: Sequence[Sequence[Group]], version: Version) -> VersionReport:
        """Make `version + 1`."""
        for groups in claims:
            self._step.add(groups, version)
        return self._step.step(version)

    def save(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.backend.save(folder / STATE)
        (folder / CONTROLS).write_text(json.dumps(self._step.controls.adapted(self._config.algorithm)))


class ReplayedLearner:
    """
    lives      of the learner, in their order, each with its configuration
    scratch    for states that later lives begin from
    otherwise  the configuration of each life by other rules. A second learner trains by them on the same groups, and
               publishes nothing
    """

    def __init__(
        self,
        lives: Sequence[tuple[Life, Config]],
        scratch: Path,
        groups: GroupStore,
        weights: WeightStore,
        otherwise: Sequence[Config] = (),
    ) -> None:
        self._items = [(number, _read(item)) for number, (life, _) in enumerate(lives) for item in life.items]
        self._lives, self._scratch, self._groups, self._weights = lives, scratch, groups, weights
        self._at = 0
        self._begins = [_begun(life) for life, _ in lives]
        self._lineage, self._threads = 0, torch.get_num_threads()
        self._otherwise, self._opened = otherwise, list[OpenLearner]()

    @property
    def ended(self) -> bool:
        return self._at == len(self._items)

    @property
    def next(self) -> TrainedVersion | None:
        """The version to be trained now."""
        item = None if self.ended else self._items[self._at][1]
        return item if isinstance(item, TrainedVersion) else None

    @property
    def lacks(self) -> ClaimedGroup | None:
        """A group that the next version needs, and that is not made yet."""
        trained = self.next
        wanted = (one for claim in (trained.claims if trained else ()) for one in claim)
        return next((one for one in wanted if not self._groups.has(one)), None)

    def advance(self) -> Iterator[Replayed]:
        """Make versions as long as their groups are there.

        Raises DivergedError if a step is refused that was not, or the other way round.
        """
        while not self.ended and self.lacks is None:
            life, item = self._items[self._at]
            self._at += 1
            match item:
                case "threads", threads:
                    self._threads = threads
                    torch.set_num_threads(threads)
                case "begun", version, lineage, _:
                    self._begin(life, Published(lineage, version))
                case "saved", version if version in self._begins[life + 1 :]:
                    for number, learner in enumerate(self._opened):
                        learner.save(self._state(version, number))
                case TrainedVersion():
                    yield self._train(item)

    def export(self, folder: Path) -> None:
        """Write the policy that was trained by other rules, as a model that plain `transformers` loads."""
        self._opened[-1].backend.export_hf(folder)

    def close(self) -> None:
        for learner in self._opened:
            learner.backend.close()
        self._opened.clear()

    def _state(self, version: Version, number: int) -> Path:
        return self._scratch / f"v{version}-{number}"

    def _begin(self, life: int, first: Published) -> None:
        if first.version and not self._state(first.version, 0).is_dir():
            raise DivergedError(
                f"{self._lives[life][0].name} began with version {first.version}, and no decisions are there of a "
                "learner that had saved it: the run began without telemetry.decisions"
            )
        self.close()
        self._lineage = first.lineage
        configs = [self._lives[life][1], *([self._otherwise[life]] if self._otherwise else [])]
        for number, config in enumerate(configs):
            state = self._state(first.version, number) if first.version else None
            self._opened.append(OpenLearner(config, state))
        torch.set_num_threads(self._threads)
        self._publish(first.version)

    def _train(self, recorded: TrainedVersion) -> Replayed:
        claims = [[self._groups.take(one) for one in claim] for claim in recorded.claims]
        torch.set_num_threads(self._threads)
        report, *otherwise = (learner.train(claims, recorded.version - 1) for learner in self._opened)
        if bool(report.refused) != recorded.refused:
            was, now = ("refused", "made") if recorded.refused else ("made", "refused")
            raise DivergedError(
                f"the step to version {recorded.version} was {was} in the run, and is {now} here"
            )
        if not recorded.refused:
            self._publish(recorded.version)
        weights = weights_hash(self._opened[0].backend)
        return Replayed(recorded, self._lineage, weights, report, *otherwise)

    def _publish(self, version: Version) -> None:
        self._weights.put(Published(self._lineage, version), live_weights(self._opened[0].backend))


def _read(item: tuple[Any, ...]) -> tuple[Any, ...] | TrainedVersion:
    """An item, read once: it is looked at often while its groups are made."""
    return TrainedVersion.from_wire(item) if item[0] == "trained" else item


def _begun(life: Life) -> Version | None:
    """The version that a life begins with; None if it was killed before that."""
    return next((item[1] for item in life.items if item[0] == "begun"), None)
