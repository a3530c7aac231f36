"""Publishing versions of the policy: the weight stream, and the log-prob probes that generators are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checks.logprob_check import LogprobGate, LogprobProbes
from asyncrl.learner.reporting.report import publish_values
from asyncrl.queue.client.client import BlockingClient
from asyncrl.sync.stream.publisher import RankPublisher
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Version

MakePublisher = Callable[[int], RankPublisher]
"""lineage → the publisher of this rank."""

LAST_TRANSFERS_S = 5.0
"""How long transfers under way may take once the learner is done."""


class Publication:
    """One rank's part of the weight stream. Collective: `begin`, `publish` and `note_probes`.

    gate: None if the generators make no real tokens
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        publisher: RankPublisher,
        gate: LogprobGate | None,
        lineage: int,
        spans: Spans,
    ) -> None:
        self._backend, self._publisher = backend, publisher
        self._lineage, self._spans = lineage, spans
        self._probes: LogprobProbes | None = None
        if gate is not None and config.probing:
            self._probes = LogprobProbes(config, backend, gate, lineage)

    def post_endpoint(self, client: BlockingClient) -> None:
        """Put into the run's registry where generators find this rank's part of the stream."""
        endpoint = {
            "endpoint": self._publisher.endpoint,
            "world": self._backend.world,
            "lineage": self._lineage,
        }
        client.post(f"weights/{self._backend.rank}", endpoint)

    def begin(self, client: BlockingClient, version: Version) -> None:
        """Let subscribers find this rank, and publish the version that it begins with."""
        self.post_endpoint(client)
        self.publish(version)
        self.note_probes(version)

    def publish(self, version: Version) -> None:
        """Publish the live weights. Returns once they may change again."""
        self._published = self._publisher.publish(version)

    def note_probes(self, version: Version) -> None:
        """Record the policy's log-probs after the probe prompts; it must still be that of `version`."""
        if self._probes is not None:
            with self._spans("compute/predict"):
                self._probes.note(version)

    def values(self, stats: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of the latest publication, and of the probes that generators have reported since the last call.
        Raises BehaviourMismatchError for probes that differ too much, see `learner.logprob_gate`."""
        probed = self._probes.judge(stats) if self._probes is not None else {}
        return probed | publish_values(self._published, self._publisher.stats())

    def close(self) -> None:
        self._publisher.close(LAST_TRANSFERS_S)
