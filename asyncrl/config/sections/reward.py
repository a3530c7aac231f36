"""The keys of the section `reward`: one function or several, what each may cost, what its parts count."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.config.sections.entries import as_section
from asyncrl.config.sections.limits import Amount, Seconds, Threads, check_values
from asyncrl.config.sections.rules import require
from asyncrl.errors import ConfigError

PER = ("rollout", "group")
ON_FAILURE = ("drop", "zero")

OWN = ("function", "options", "per", "deadline_s", "retries", "workers", "on_failure", "max_failed_share")
"""The keys of one entry of `reward.functions`."""


@dataclass(frozen=True)
class RewardConfig:
    # fmt: off
    function: str | None = "???"  # 'package.module:function' or 'file.py:function', plain or async: (task, text) ->
    #                        a number, {part: number}, or asyncrl.Scored, which speaks of steps too;
    #                        a class is made once, and its instance called
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the function, or of the class
    per: Literal["rollout", "group"] = "rollout"  # group: called with all texts of a task at once, gives a list
    weights: dict[str, float] = field(default_factory=dict)  # of parts in the reward's sum; of others: 1
    deadline_s: Seconds = 60.0  # of one call
    retries: Amount = 1  # calls after a failed one
    workers: Threads = 4  # threads for plain functions
    on_failure: Literal["drop", "zero"] = "drop"  # of the last retry: drop the task with reason 'reward', or count 0
    max_failed_share: float = 0.5  # of the last 512 tasks (64 at least) that may be dropped with reason 'reward'; above
    #                        it the run ends; 1: only failures without end do that
    functions: dict[str, Any] = field(default_factory=dict)  # several in place of `function`: {name: {function: …,
    #                        and, if not as above: options, per, deadline_s, retries, workers, on_failure,
    #                        max_failed_share}}.
    #                        A number is then the part <name>, a part <name>/<part>
    # fmt: on

    def __post_init__(self) -> None:
        check_values("reward", self)
        for key, value, known in (("per", self.per, PER), ("on_failure", self.on_failure, ON_FAILURE)):
            require(value in known, f"reward.{key}", value, "is not known", f"set {' or '.join(known)}")
        require(
            0 < self.max_failed_share <= 1,
            "reward.max_failed_share",
            self.max_failed_share,
            "is a share of tasks, above 0 and at most 1",
            "set reward.max_failed_share=0.5",
        )
        for part, weight in self.weights.items():
            require(
                isinstance(weight, (int, float)) and math.isfinite(weight),
                f"reward.weights.{part}",
                weight,
                "must be a finite number",
                f"set reward.weights.{part}=0 for a part that is only logged",
            )
        require(
            not self.functions or self.function in (None, "???"),
            "reward.function",
            self.function,
            "stands beside reward.functions, which takes its place",
            "make it one of reward.functions, or set reward.function=null",
        )
        for name in self.functions:
            self.of(name)

    def of(self, name: str) -> RewardConfig:
        """The section as one of `functions` has it; "" is `function` itself."""
        if not name:
            return self
        key, entry = f"reward.functions.{name}", self.functions[name]
        require(
            "/" not in name, key, name, "would name a part of another function", "choose a name without /"
        )
        named = isinstance(entry, Mapping) and "function" in entry
        require(named, key, entry, "names no function", f"set {key}.function='package.module:function'")
        for own, value in entry.items():
            require(own in OWN, f"{key}.{own}", value, "no such key", f"the keys are {', '.join(OWN)}")
        inherited = {own: getattr(self, own) for own in OWN if own not in ("function", "options")}
        try:
            return as_section(RewardConfig, key, inherited | entry)
        except ConfigError as error:
            if error.key.startswith(key):
                raise
            itself = error.key.replace("reward", key, 1)
            remedy = error.remedy.replace(error.key, itself)
            raise ConfigError(itself, error.value, error.rule, remedy) from None

    def without(self, names: Collection[str]) -> RewardConfig:
        """The section without these of its functions, and without the weights of their parts."""
        functions = {name: entry for name, entry in self.functions.items() if name not in names}
        weights = {part: w for part, w in self.weights.items() if part.partition("/")[0] not in names}
        return dataclasses.replace(self, functions=functions, weights=weights)

    @property
    def each(self) -> list[RewardConfig]:
        """The section as each function has it."""
        return [self.of(name) for name in self.functions or ("",)]
