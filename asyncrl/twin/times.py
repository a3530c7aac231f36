"""The stage times that a simulation runs on: calibrated from a run, or written by hand as a YAML file.

    decode step of n sequences     generation.step_s + n · generation.sequence_s
    prefill, as n of them join     generation.prefill_s + n · generation.prefill_sequence_s: nobody decodes meanwhile
    a group, once it is decoded    generation.reward_s, beside the decoding of others
    a claim of the learner         learner.claim_s + learner.token_s · tokens of the busiest data rank
    a version of the learner       learner.version_s once, then learner.publish_s and learner.report_s
    a version to a generator       sync.fetch_s beside the decoding, sync.flip_s during which the engine stands still
    requests to the queue          sync.queue_s each; and, one after another, the times of `queue` (brokers.py)

All are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from asyncrl.config.load import parse_file
from asyncrl.config.rules import NotNegative, Positive, Rule, Section, as_section, key, require

AT = "times"
"""Begins the dotted names of the keys in errors."""


@dataclass(frozen=True)
class GenerationTimes(Section):
    step_s: NotNegative = key(0.02, "seconds of a decode step, before the sequences in it count")
    sequence_s: NotNegative = key(0.0002, "seconds that each sequence adds to a decode step")
    prefill_s: NotNegative = key(0.0, "seconds of a prefill, before the sequences that join with it count")
    prefill_sequence_s: NotNegative = key(
        0.0, "seconds that each sequence adds to the prefill with which it joins"
    )
    reward_s: NotNegative = key(0.0, "seconds from the last token of a group to its commit")

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.step_s + self.sequence_s > 0,
            "step_s",
            "a decode step takes time: step_s and sequence_s are both 0",
            f"set {at}.step_s=0.02",
        )

    def decode(self, sequences: float) -> float:
        """Seconds of a decode step."""
        return self.step_s + self.sequence_s * sequences

    @property
    def first_tokens(self) -> int:
        """Tokens of a sequence that its prefill makes: 0 if prefills take no time of their own."""
        return int(self.prefill_s + self.prefill_sequence_s > 0)


@dataclass(frozen=True)
class Lengths(Section):
    """Tokens that the policy makes in a rollout: `quantiles`, or a log-normal distribution cut at `most`."""

    median: Positive = key(512.0, "median of the tokens of a rollout")
    sigma: NotNegative = key(
        0.0, "standard deviation of the logarithm of the tokens; 0: all rollouts are equally long"
    )
    most: Positive = key(1e9, "longest rollout, as generator.max_tokens")
    quantiles: list[float] = key(
        [], "the distribution, at evenly spaced shares from 0 to 1, in place of the others"
    )
    prompt: NotNegative = key(0.0, "tokens of a prompt, which the learner computes with each rollout")

    def rules(self, at: str) -> Iterator[Rule]:
        points = self.quantiles
        yield Rule(
            not points or (min(points) > 0 and sorted(points) == points),
            "quantiles",
            "must rise, from a shortest rollout of more than 0 tokens",
            f"sort {at}.quantiles, or leave it out",
        )

    def table(self) -> np.ndarray:
        """The distribution as quantiles, in tokens."""
        if self.quantiles:
            return np.minimum(np.array(self.quantiles, float), self.most)
        if self.sigma == 0:
            return np.array([min(self.median, self.most)])
        shares = (np.arange(1025) + 0.5) / 1025
        normal = np.array([NormalDist().inv_cdf(share) for share in shares])
        return np.minimum(self.median * np.exp(self.sigma * normal), self.most)

    def mean(self) -> float:
        """Mean tokens of a rollout, the prompt left out."""
        table = self.table()
        return float(table[0]) if len(table) == 1 else float((table[1:] + table[:-1]).mean() / 2)


@dataclass(frozen=True)
class LearnerTimes(Section):
    token_s: NotNegative = key(1e-5, "seconds of one data rank for a token, prompts included")
    claim_s: NotNegative = key(0.0, "seconds of each claim, however many tokens it has")
    version_s: NotNegative = key(
        0.1, "seconds of a version that no number of ranks shortens: the optimizer step"
    )
    publish_s: NotNegative = key(0.0, "seconds that the learner waits for the copy of its weights")
    report_s: NotNegative = key(
        0.0, "seconds that it waits for the rest of the answer to its report of a version"
    )
    first_claim_s: NotNegative = key(
        0.0, "seconds that a version's first claim takes beyond a request, although its groups are ready"
    )


@dataclass(frozen=True)
class SyncTimes(Section):
    fetch_s: NotNegative = key(0.0, "seconds from a publication until a generator has the version")
    model_gb: NotNegative = key(
        0.0,
        "10^9 bytes of the weights; above 0, the tree of sync.network_gb_s predicts each fetch, not fetch_s",
    )
    flip_s: NotNegative = key(0.0, "seconds that an engine stands still for a new version")
    switch_s: NotNegative = key(
        0.0,
        "colocated pools: seconds of each change from training to generation, offloading and weights included",
    )
    queue_s: NotNegative = key(0.0, "seconds of a request to the queue")


@dataclass(frozen=True)
class QueueTimes(Section):
    """The queue works off one request after another. Zeros leave it out."""

    group_s: NotNegative = key(0.0, "seconds for a group, from its task to its claim, without its payload")
    byte_s: NotNegative = key(0.0, "seconds for a byte of a payload, coming in and going out together")
    token_bytes: NotNegative = key(8.0, "bytes of the payload of a token, prompts included")
    request_s: NotNegative = key(0.0, "seconds for the request of each further data rank in a claim")
    generator_share: NotNegative = key(0.0, "share of its time that each generator takes: heartbeats")
    rank_share: NotNegative = key(0.0, "share of its time that each data rank takes: claims that it repeats")


@dataclass(frozen=True)
class StageTimes:
    """generator_devices, rank_devices: devices of the one generator and of the one data rank that these times are of"""

    generation: GenerationTimes = GenerationTimes()
    lengths: Lengths = Lengths()
    learner: LearnerTimes = LearnerTimes()
    sync: SyncTimes = SyncTimes()
    queue: QueueTimes = QueueTimes()
    generator_devices: int = 1
    rank_devices: int = 1


SECTIONS: Mapping[str, type[Section]] = {
    "generation": GenerationTimes,
    "lengths": Lengths,
    "learner": LearnerTimes,
    "sync": SyncTimes,
    "queue": QueueTimes,
}
DEVICES = ("generator_devices", "rank_devices")


def read_times(path: Path) -> StageTimes:
    """Raises ConfigError for a file that cannot be read, for keys that are none, and for values out of their limits."""
    return times_of(parse_file(path)[0])


def times_of(tree: Mapping[str, Any]) -> StageTimes:
    """Stage times from the values of a file. Raises ConfigError as `read_times`."""
    for name, value in tree.items():
        remedy = f"the keys are {', '.join([*SECTIONS, *DEVICES])}"
        require(name in SECTIONS or name in DEVICES, f"{AT}.{name}", value, "no such key", remedy)
        if name in DEVICES:
            fits = type(value) is int and value > 0
            require(fits, f"{AT}.{name}", value, "is a number of devices", f"set {AT}.{name}=1")
    found: dict[str, Any] = {
        name: as_section(schema, f"{AT}.{name}", tree.get(name, {})) for name, schema in SECTIONS.items()
    }
    return StageTimes(**found, **{name: tree[name] for name in DEVICES if name in tree})
