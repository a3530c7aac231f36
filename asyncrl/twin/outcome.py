"""The setup of a simulated run, its outcome, and the bound that the stage times set to both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.telemetry.spans import busy_share
from asyncrl.twin.times import StageTimes


@dataclass(frozen=True, slots=True)
class Setup:
    """A run to be simulated.

    groups, group_size  of one version; rollouts of a group
    slots               sequences that one generator decodes at once
    data_ranks          ranks of the learner that share the groups of a version
    window, depth       as `queue.window` and `queue.depth` resolve; Nones: as they do without these keys
    claim_tokens        most tokens of one claim of a data rank; None: no limit
    whole_batch         the learner computes once all groups of a version are in
    payload_brokers     processes that payloads pass in place of the queue's (brokers.py); none in a real run
    colocated           both pools have the same devices, and take turns; only with max_staleness 0
    """

    groups: int
    group_size: int
    generators: int = 1
    slots: int = 64
    data_ranks: int = 1
    max_staleness: int = 1
    window: int | None = None
    depth: int | None = None
    claim_tokens: int | None = None
    whole_batch: bool = False
    payload_brokers: int = 0
    colocated: bool = False

    def __post_init__(self) -> None:
        if self.colocated and self.max_staleness:
            raise ValueError("colocated pools take turns: max_staleness must be 0")
        if self.payload_brokers < 0:
            raise ValueError(f"payload_brokers = {self.payload_brokers} must be at least 0")
        for name in ("groups", "group_size", "generators", "slots", "data_ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")

    @property
    def mode(self) -> str:
        if self.colocated:
            return "sync_colocated"
        return ("sync_split", "one_step", "async")[min(self.max_staleness, 2)]

    @property
    def window_groups(self) -> int:
        return self.window or (1 if self.max_staleness <= 1 else self.groups + 1)

    @property
    def depth_groups(self) -> int:
        return self.depth or (self.max_staleness + 1) * self.groups

    @property
    def spare_versions(self) -> int:
        """S, by which a lease may run ahead."""
        return self.max_staleness - -(-(self.window_groups - 1) // self.groups)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Steady state of one simulated run: the first versions are left out.

    generators, learner  seconds of one process by name; names with wait/ before them are waits
    staleness            groups that were trained, by their versions of age
    pause_share          of a generator's time, for flips · lag_s: mean seconds from a publication to its flip's end
    bound                groups per second that the stage times allow, without waits
    brokers              busy shares: of the queue, and of each payload broker; above 1 where requests pile up
    """

    setup: Setup
    versions: int
    seconds: float
    tokens: float
    generators: Mapping[str, float]
    learner: Mapping[str, float]
    staleness: Counter[int]
    lag_s: float
    bound: float
    brokers: tuple[float, ...]

    @property
    def groups_per_s(self) -> float:
        return sum(self.staleness.values()) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def version_s(self) -> float:
        return self.seconds / self.versions

    @property
    def pause_share(self) -> float:
        return self.shares("generators")["wait/weights"]

    @property
    def mean_staleness(self) -> float:
        return sum(age * count for age, count in self.staleness.items()) / sum(self.staleness.values())

    def busy(self, pool: str) -> float:
        """Share of the time that a process of the pool works, 0 to 1."""
        return busy_share(getattr(self, pool))

    def shares(self, pool: str) -> dict[str, float]:
        """Share of each name in the time of a process."""
        seconds: Mapping[str, float] = getattr(self, pool)
        total = sum(seconds.values())
        return {name: value / total for name, value in seconds.items()}


def bound(setup: Setup, times: StageTimes, tokens: float, learn_s: float) -> float:
    """Groups per second without any wait.

    One version takes max(G, L) where the pools overlap, and G + L where they take turns. A generator is fastest with
    all of its share of the sequences that may be under way. Prefills are fewest if a group's sequences join together,
    and the groups of all slots at once.

    tokens: of the policy in a version · learn_s: L, seconds of the learner for a version, its publication included
    """
    under_way = min((setup.spare_versions + 1) * setup.groups, setup.depth_groups + setup.window_groups)
    sequences = min(setup.slots, under_way * setup.group_size / setup.generators)
    rollouts, generation = setup.groups * setup.group_size, times.generation
    decoded = tokens - rollouts * generation.first_tokens
    generate_s = decoded * generation.decode(sequences) / sequences
    generate_s += setup.groups * (generation.prefill_sequence_s + generation.prefill_s / setup.slots)
    generate_s /= setup.generators
    in_turns = setup.colocated or (setup.max_staleness == 0 and setup.claim_tokens is None)
    if setup.colocated:
        generate_s += times.sync.switch_s
    return setup.groups / (generate_s + learn_s if in_turns else max(generate_s, learn_s))
