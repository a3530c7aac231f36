"""`learner.on_bad_batch` and `learner.on_bad_step`: stop the run, or train the version again on other groups."""

from __future__ import annotations

import logging

from asyncrl.config.schema import LearnerConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.checks.finite_check import NonFiniteGroups
from asyncrl.learner.train_stream import TrainStream
from asyncrl.types import Version

log = logging.getLogger(__name__)

MAX_BAD_STEPS = 3
"""Refused steps in a row that end the run even under `on_bad_step: skip`."""

MAX_BAD_BATCHES = 3
"""Restarts of a version that end the run even under `on_bad_batch: skip`: its model is broken then, not its groups."""


class FailurePolicy:
    """Counts failures in a row. Collective: every method."""

    def __init__(self, config: LearnerConfig, stream: TrainStream) -> None:
        self._config, self._stream = config, stream
        self._bad_steps = self._bad_batches = self._left_out = 0

    def leave_out(self, bad: NonFiniteGroups, version: Version) -> None:
        """Restart the version without its bad groups. Nothing has moved.

        Raises:
            TrainingError: Under `on_bad_batch: stop`, or after too many failures in a row.
        """
        self._bad_batches += 1
        if self._config.on_bad_batch == "stop" or self._bad_batches >= MAX_BAD_BATCHES:
            raise TrainingError(
                f"for version {version} {bad}; the {self._bad_batches}. such finding for it. Nothing has moved: "
                "look at these tasks and their rewards, or set learner.on_bad_batch=skip to train without them"
            )
        log.warning("for version %d %s: it is begun anew without them", version, bad)
        self._left_out += len(bad.ordinals)
        self._stream.leave_out(version, bad.ordinals)

    def refuse_step(self, reason: str, version: Version) -> None:
        """Drop the groups of a version whose optimizer step was not finite.

        That step has moved no model; earlier optimizer steps of the version stand.

        Raises:
            TrainingError: Under `on_bad_step: stop`, or after too many failures in a row.
        """
        self._bad_steps += 1
        failure = f"the step from version {version} has {reason}"
        if self._config.on_bad_step == "stop" or self._bad_steps >= MAX_BAD_STEPS:
            raise TrainingError(
                f"{failure}, the {self._bad_steps}. such step in a row; "
                "that step moved nothing, earlier steps of this version stand"
            )
        log.warning("%s: its groups are dropped", failure)
        self._stream.reject(version)

    def version_trained(self) -> int:
        """End a row of failures. Returns how many groups were left out since the last version."""
        left_out = self._left_out
        self._bad_steps = self._bad_batches = self._left_out = 0
        return left_out
