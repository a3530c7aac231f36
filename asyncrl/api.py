"""`asyncrl.train`: what `asyncrl train` does, from a user's own script with the user's own functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config.dotted import name_function, refuse_in_import
from asyncrl.config.load import load_config


def train(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    tasks: Callable[[], Any] | None = None,
    reward: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    """Run everything on this machine until the last version and return the summary (also in summary.json).

    config     a YAML file, as for the command line; `overrides`: "key=value" texts on top of it
    tasks      a function without arguments that returns or yields rows {"prompt": …, **data}; replaces `tasks.source`
    reward     (task, text) or (task, text, rollout) -> a number, {part: number} or `asyncrl.Scored`, plain or async;
               replaces `reward.function`. Several by name: each replaces `reward.functions.<name>.function`

    The run's processes import both functions again, so each must stand at the top level of a module or script,
    and a script must start its work under `if __name__ == "__main__"`. Raises ConfigError for functions that
    cannot be imported, for a script without that guard and for tasks or models that are not there, and what
    `asyncrl.launch.local.train` raises.
    """
    from asyncrl.launch.local import train as train_here
    from asyncrl.launch.preflight import preflight

    refuse_in_import()
    named = []
    if tasks is not None:
        named.append(f"tasks.source='{name_function(tasks, 'tasks')}'")
        if inspect.isgeneratorfunction(tasks):
            named.append("tasks.shuffle=false")  # rows that come one by one have no order to change
    if isinstance(reward, Mapping):
        for name, function in reward.items():
            spec = name_function(function, f"reward[{name!r}]")
            named.append(f"reward.functions.{name}.function='{spec}'")
    elif reward is not None:
        named.append(f"reward.function='{name_function(reward, 'reward')}'")
    loaded = load_config(config, [*named, *overrides])
    if tasks is not None:  # options in the file are those of the source that `tasks` replaces
        loaded = replace(loaded, tasks=replace(loaded.tasks, options={}))
    preflight(loaded)
    return train_here(loaded)
