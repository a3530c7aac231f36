"""When checkpoints are made, and when the queue learns of them.

every `checkpoint.every` versions ── snapshot of the train stream ──▸ Saver.begin
all ranks have written it         ── checkpointed(version) ──▸ the queue forgets the steps before it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.config.schema import CheckpointConfig
from asyncrl.learner.checkpoint import Meta, Saver
from asyncrl.learner.train_stream import TrainStream
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Version


class CheckpointSchedule:
    """The checkpoints of a run. Collective: every method.

    Args:
        empty_eval: Snapshot of the eval stream without evaluations under way, on rank 0.
        saved: The version that was restored, if one was.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        saver: Saver,
        stream: TrainStream,
        empty_eval: bytes | None,
        saved: Version | None,
        spans: Spans,
    ) -> None:
        self.saver, self._config, self._stream, self._spans = saver, config, stream, spans
        self._empty_eval = empty_eval
        self._newest = saved  # saved, or being saved

    def save_if_due(self, version: Version, coefficients: Mapping[str, float]) -> None:
        if version % self._config.every == 0:
            self.save(version, coefficients)

    def save(self, version: Version, coefficients: Mapping[str, float]) -> None:
        """Begin to save this version, unless it is saved. coefficients: `Meta.controls`."""
        if self._newest == version:
            return
        self.finish()
        with self._spans("wait/checkpoint"):
            self.saver.begin(Meta(version, self._stream.snapshot(), self._empty_eval, coefficients))
        self._newest = version
        if not self._config.asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint under way is whole."""
        with self._spans("wait/checkpoint"):
            self._report(self.saver.finish())

    def settle(self, states: Sequence[str]) -> None:
        """Complete the checkpoint under way if all ranks have written it. states: `Saver.state` of all ranks."""
        self._report(self.saver.settle(states))

    def _report(self, version: Version | None) -> None:
        if version is not None:
            self._stream.checkpointed(version)
