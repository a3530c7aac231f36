"""The keys of the section `placement`: which models beside the policy run in processes of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.sections.limits import Processes, Seconds, Threads, check_values
from asyncrl.config.sections.rules import check_devices, require

REWARDS = "rewards"
"""The only pool that is no model of the learner's: the reward functions."""


@dataclass(frozen=True)
class PlaceConfig:
    # fmt: off
    where: Literal["colocated", "pool"] = "colocated"  # colocated: in the processes of the learner (of the generators,
    #                        for rewards); pool: in processes of its own
    processes: Processes = 1  # that `asyncrl train` starts; each holds the whole model (one that learns: 1)
    ranks: Processes = 1  # of one process, over which its model is sharded (torchrun does it in a split run)
    devices: str | None = None  # CUDA_VISIBLE_DEVICES of the pool, dealt out to them; none: as the shell has it
    threads: Threads | None = None  # CPU threads of one process; none: cores shared out over the run's processes
    deadline_s: Seconds = 600.0  # of the pool's work on one group; where it learns, on one call of the learner
    # fmt: on


@dataclass(frozen=True)
class RewardsPlaceConfig(PlaceConfig):
    functions: list[str] = field(default_factory=list)  # of reward.functions, that run in the pool; none: all


@dataclass(frozen=True)
class PlacementConfig:
    """Where models run, and reward functions. Pools reach groups through the queue: docs/pools.md."""

    reference: PlaceConfig = field(default_factory=PlaceConfig)
    teacher: PlaceConfig = field(default_factory=PlaceConfig)
    reward_model: PlaceConfig = field(default_factory=PlaceConfig)
    critic: PlaceConfig = field(default_factory=PlaceConfig)
    cost_critic: PlaceConfig = field(default_factory=PlaceConfig)
    rewards: RewardsPlaceConfig = field(default_factory=RewardsPlaceConfig)

    def __post_init__(self) -> None:
        for name, place in self.places.items():
            key = f"placement.{name}"
            check_values(key, place)
            check_devices(f"{key}.devices", place.devices)
            ranks_on = len(place.devices.split(",")) if place.devices else place.ranks
            require(
                place.ranks <= ranks_on,
                f"{key}.ranks",
                place.ranks,
                f"is more than {key}.devices={place.devices} has GPUs, and each rank needs one of its own",
                f"set {key}.ranks={ranks_on}, or name more GPUs",
            )
            for other in dataclasses.fields(place):
                value = getattr(place, other.name)
                require(
                    place.where == "pool" or value == _default(other),
                    f"{key}.{other.name}",
                    value,
                    f"is of a pool, and {key}.where=colocated",
                    f"set {key}.where=pool",
                )
        require(
            self.rewards.ranks == 1,
            "placement.rewards.ranks",
            self.rewards.ranks,
            "reward functions are not split over ranks",
            "set placement.rewards.processes in its place",
        )

    @property
    def places(self) -> Mapping[str, PlaceConfig]:
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    @property
    def pools(self) -> Mapping[str, PlaceConfig]:
        """What runs in processes of its own, by name."""
        return {name: place for name, place in self.places.items() if place.where == "pool"}


def _default(entry: dataclasses.Field[object]) -> object:
    made = entry.default_factory
    return entry.default if made is dataclasses.MISSING else made()
