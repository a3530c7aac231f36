"""The section `placement`: which models and reward functions run in processes of their own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from asyncrl.config.rules import (
    Processes,
    Rule,
    Seconds,
    Section,
    Threads,
    as_sections,
    device_rules,
    key,
)

REWARDS = "rewards"
"""The only pool that is no model of the learner's: the reward functions."""

OWN_MODELS = "placement.own"
"""The key of the places of models that users declare: sections, each with keys that processes agree on and others."""

POOL_NAME = re.compile(r"[a-z]([a-z0-9_]{0,38}[a-z0-9])?")
"""The name of a pool that a user declares: also one of processes, and with - for _ of objects in Kubernetes."""

COLOCATED: Mapping[str, str] = {
    "placement.colocate": "true",
    "sync.staging": "host",
    "sync.snapshot_device": "host",
}
"""The keys of pools that take turns on the same devices, as configs/placement/colocated.yaml has them."""


@dataclass(frozen=True)
class PlaceConfig(Section):
    where: Literal["colocated", "pool"] = key(
        "colocated",
        "colocated: in the processes of the learner (of the generators, for rewards); pool: in processes of "
        "its own",
    )
    processes: Processes = key(
        1, "that `asyncrl train` starts; each holds the whole model (one that learns: 1)"
    )
    ranks: Processes = key(1, "of one process, over which its model is sharded; on all machines together")
    devices: str | None = key(
        None, "CUDA_VISIBLE_DEVICES of the pool, dealt out to them; none: as the shell has it"
    )
    threads: Threads | None = key(
        None, "CPU threads of one process; none: cores shared out over the run's processes"
    )
    deadline_s: Seconds = key(
        600.0, "of the pool's work on one group; where it learns, on one call of the learner"
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield from device_rules(at, self.devices)
        ranks_on = len(self.devices.split(",")) if self.devices else self.ranks
        yield Rule(
            self.ranks <= ranks_on,
            "ranks",
            f"is more than {at}.devices={self.devices} has GPUs, and each rank needs one of its own",
            f"set {at}.ranks={ranks_on}, or name more GPUs",
        )
        unset = type(self)()
        for name, value in vars(self).items():
            yield Rule(
                self.where == "pool" or value == getattr(unset, name),
                name,
                f"is of a pool, and {at}.where=colocated",
                f"set {at}.where=pool",
            )


@dataclass(frozen=True)
class RewardsPlaceConfig(PlaceConfig):
    functions: list[str] = key([], "of reward.functions, that run in the pool; none: all")


@dataclass(frozen=True)
class PlacementConfig(Section):
    """Where models run, and reward functions. Pools reach groups through the queue: docs/pools.md."""

    reference: PlaceConfig = field(default_factory=PlaceConfig)
    teacher: PlaceConfig = field(default_factory=PlaceConfig)
    reward_model: PlaceConfig = field(default_factory=PlaceConfig)
    critic: PlaceConfig = field(default_factory=PlaceConfig)
    cost_critic: PlaceConfig = field(default_factory=PlaceConfig)
    rewards: RewardsPlaceConfig = field(default_factory=RewardsPlaceConfig)
    own: dict[str, Any] = key(
        {}, "of models that a file of yours declares, {name: {where: pool, and any of the keys above}}"
    )
    generators: dict[str, Any] = key(
        {},
        "further pools of generators, {name: {count: 2, and other keys of `generator` that it has of its own}}; "
        "see docs/engines.md",
    )
    colocate: bool = key(
        False, "generators and the learner take turns on the same devices, see docs/colocation.md"
    )
    turn_deadline_s: Seconds = key(3600.0, "of the wait for a turn, which lasts as long as the other's phase")

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.rewards.ranks == 1,
            "rewards.ranks",
            "reward functions are not split over ranks",
            "set placement.rewards.processes in its place",
        )
        built_in = {entry.name for entry in dataclasses.fields(self)}
        for name in self.own:
            yield Rule(
                POOL_NAME.fullmatch(name) is not None and name not in built_in,
                f"own.{name}",
                "is no name of a model that a file of yours declares",
                f"write placement.{name} for a built-in model, else at most 40 small letters, digits and _",
                name,
            )
        as_sections(PlaceConfig, OWN_MODELS, self.own)  # raises the errors of entries
        for name in self.generators:
            yield Rule(
                POOL_NAME.fullmatch(name) is not None,
                f"generators.{name}",
                "is no name of a pool",
                "begin with a small letter, and go on with at most 39 small letters, digits and _",
                name,
            )

    @cached_property
    def places(self) -> Mapping[str, PlaceConfig]:
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        built_in = {name: value for name, value in values.items() if isinstance(value, PlaceConfig)}
        return built_in | as_sections(PlaceConfig, OWN_MODELS, self.own)

    @cached_property
    def pools(self) -> Mapping[str, PlaceConfig]:
        """Models that run in processes of their own, by name."""
        return {name: place for name, place in self.places.items() if place.where == "pool"}

    def key_of(self, name: str) -> str:
        """The key of a place.

        >>> PlacementConfig(own={"twin": {}}).key_of("twin"), PlacementConfig().key_of("critic")
        ('placement.own.twin', 'placement.critic')
        """
        return f"{OWN_MODELS}.{name}" if name in self.own else f"placement.{name}"

    def one_process(self, name: str) -> Rule:
        """For the pool of a model that learns."""
        key, processes = self.key_of(name), self.places[name].processes
        rule, remedy = (
            "are copies of a model, and one that learns is one model",
            f"set {key}.ranks={processes}",
        )
        return Rule(processes == 1, f"{key}.processes", rule, f"{remedy}, which share it", processes)
