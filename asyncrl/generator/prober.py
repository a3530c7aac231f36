"""After each flip, a few tokens whose log-probs the learner compares with its own: see `probes.py`.

held rises ──▸ one token after each of the prompts ──▸ reports, which travel with the worker's telemetry
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncrl.generator.engines.engine import RequestFailedError, SampleLostError, Sampler, SampleRequest
from asyncrl.generator.weights import WeightFollower
from asyncrl.types import NO_VERSION, Array, Sampling

log = logging.getLogger(__name__)

RECENT = 8
"""Reports that stay: more than flips between two heartbeats."""


PROBE = "probe"
"""The first word of its requests' names; then lineage, version and the number of the prompt."""


def probe(request_id: str, number: int, prompts: Sequence[Array], sampling: Sampling) -> SampleRequest:
    """The request of one token after a prompt. sampling: that of training"""
    return SampleRequest(request_id, prompts[number], replace(sampling, max_tokens=1), ordinal=number)


class Prober:
    """sampling: that of training; prompts: the same in the learner."""

    def __init__(
        self, engine: Sampler, follower: WeightFollower, prompts: Sequence[Array], sampling: Sampling
    ) -> None:
        self._engine, self._follower, self._prompts = engine, follower, prompts
        self._sampling = sampling
        self._reports: deque[dict[str, Any]] = deque(maxlen=RECENT)

    async def run(self) -> None:
        """Until cancelled."""
        lineage, held = -1, NO_VERSION
        while True:
            await self._follower.past(lineage, held)
            lineage, held = self._follower.lineage, self._follower.held
            requests = (
                probe(f"{PROBE}/{lineage}/{held}/{p}", p, self._prompts, self._sampling)
                for p in range(len(self._prompts))
            )
            try:
                turns = [turn for (turn,) in await asyncio.gather(*map(self._engine.sample, requests))]
            except (RequestFailedError, SampleLostError) as error:
                log.warning("version %d goes without a probe: %s", held, error)
                continue
            # A token of a later version has a report of its own.
            if all(turn.versions.tolist() == [held] for turn in turns) and self._follower.lineage == lineage:
                self._reports.append(
                    {
                        "lineage": lineage,
                        "version": held,
                        "temperature": self._sampling.temperature,
                        "tokens": [int(turn.output_ids[0]) for turn in turns],
                        "logprobs": [float(turn.logprobs[0]) for turn in turns],
                    }
                )

    def reports(self) -> list[dict[str, Any]]:
        """The last few."""
        return list(self._reports)
