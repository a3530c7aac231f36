"""The section `reward`: the functions that score rollouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from asyncrl.config.rules import Amount, Rule, Seconds, Section, Threads, as_section, key, require
from asyncrl.errors import call_all

OWN = ("function", "options", "per", "deadline_s", "retries", "workers", "on_failure", "max_failed_share")
"""The keys of one entry of `reward.functions`."""


@dataclass(frozen=True)
class RewardConfig(Section):
    function: str | None = key(
        "???",
        "'package.module:function' or 'file.py:function', plain or async: (task, text) -> a number, {part: "
        "number}, or asyncrl.Scored, with rewards of steps too; a class is made once, and its instance called",
    )
    options: dict[str, Any] = key({}, "keyword arguments of the function, or of the class")
    per: Literal["rollout", "group"] = key(
        "rollout", "group: called with all texts of a task at once, gives a list"
    )
    weights: dict[str, float] = key({}, "of parts in the reward's sum; of others: 1")
    deadline_s: Seconds = key(60.0, "of one call")
    retries: Amount = key(1, "calls after a failed one")
    workers: Threads = key(4, "threads for plain functions")
    on_failure: Literal["drop", "zero"] = key(
        "drop", "of the last retry: drop the task with reason 'reward', or count 0"
    )
    max_failed_share: float = key(
        0.5,
        "of the last 512 tasks (64 at least) that may be dropped with reason 'reward'; above it the run ends; "
        "1: only failures without end do that",
    )
    functions: dict[str, Any] = key(
        {},
        "several in place of `function`: {name: {function: …, and, if not as above: options, per, deadline_s, "
        "retries, workers, on_failure, max_failed_share}}. A number is then the part <name>, a part "
        "<name>/<part>",
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            0 < self.max_failed_share <= 1,
            "max_failed_share",
            "is a share of tasks, above 0 and at most 1",
            f"set {at}.max_failed_share=0.5",
        )
        for part, weight in self.weights.items():
            yield Rule(
                isinstance(weight, (int, float)) and math.isfinite(weight),
                f"weights.{part}",
                "must be a finite number",
                f"set reward.weights.{part}=0 for a part that is only logged",
                weight,
            )
        yield Rule(
            not self.functions or self.function in (None, "???"),
            "function",
            "stands beside reward.functions, which takes its place",
            "make it one of reward.functions, or set reward.function=null",
        )
        call_all(partial(self.of, name) for name in self.functions)

    def of(self, name: str) -> RewardConfig:
        """The section as one of `functions` has it; "" is `function` itself. Raises ConfigError."""
        if not name:
            return self
        at, entry = f"reward.functions.{name}", self.functions[name]
        remedy = "choose a name without /"
        require("/" not in name, at, name, "would name a part of another function", remedy)
        named = isinstance(entry, Mapping) and "function" in entry
        require(named, at, entry, "names no function", f"set {at}.function='package.module:function'")
        for own, value in entry.items():
            require(own in OWN, f"{at}.{own}", value, "no such key", f"the keys are {', '.join(OWN)}")
        inherited = {own: getattr(self, own) for own in OWN if own not in ("function", "options")}
        return as_section(RewardConfig, at, inherited | entry)

    def without(self, names: Collection[str]) -> RewardConfig:
        """The section without these of its functions, and without the weights of their parts."""
        functions = {name: entry for name, entry in self.functions.items() if name not in names}
        weights = {part: w for part, w in self.weights.items() if part.partition("/")[0] not in names}
        return dataclasses.replace(self, functions=functions, weights=weights)

    @property
    def each(self) -> list[RewardConfig]:
        """The section as each function has it."""
        return [self.of(name) for name in self.functions or ("",)]
