"""Commands on the decisions of runs: make one again, compare two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cli.command import Arguments, Command, loading, option

if TYPE_CHECKING:
    from asyncrl.replay.replayed_learner import Replayed


def _replay(arguments: Arguments) -> int:
    from asyncrl.launch.folder.run_folder import config_of, find_run

    run = find_run(arguments.run)
    config_of(run)
    loading(arguments, f"torch and the model of {run}")
    return asyncio.run(_made_again(run, arguments.until, arguments.overrides))


async def _made_again(run: Path, until: int | None, keys: Sequence[str]) -> int:
    from asyncrl.errors import DivergedError
    from asyncrl.replay.replay import replay
    from asyncrl.replay.what_if import WhatIf

    what_if = WhatIf(run, keys) if keys else None
    versions = 0
    async for made in replay(run, until, keys, None if what_if is None else what_if.model):
        if not made.same:
            raise DivergedError(
                f"version {made.recorded.version} of {run} is made anew otherwise: {made.difference}"
            )
        versions += 1
        print(_line(made), flush=True)
        if what_if is not None:
            what_if.write(made)
    print(f"{versions} versions of {run} made again, all with the recorded weights")
    if what_if is not None:
        print(f"by {' '.join(keys)}: {what_if.folder}; no rollout there is of its own policy")
    return 0


def _line(made: Replayed) -> str:
    groups = sum(map(len, made.recorded.claims))
    refused = ", a step that was refused" if made.recorded.refused else ""
    return (
        f"version {made.recorded.version}: {groups} groups, weights {made.weights:016x} as recorded{refused}"
    )


def _bisect(arguments: Arguments) -> int:
    from asyncrl.errors import DivergedError
    from asyncrl.launch.folder.run_folder import find_run
    from asyncrl.replay.bisect import bisect

    first, second = find_run(arguments.first), find_run(arguments.second)
    found = bisect(first, second)
    if found is not None:
        raise DivergedError(f"{found.kind}, after {found.after} steps that are alike: {found.text}")
    print(
        f"{first} and {second} are alike in all decisions, groups, gradients and weights that they have recorded"
    )
    return 0


RUN = "folder of a run, or its name under runs/"

COMMANDS: dict[str, Command] = {
    "replay": Command(
        _replay,
        "make a run again",
        "Make an asynchronous run of many processes again in this one, from the decisions that it has recorded "
        "(telemetry.decisions): the same tokens, groups and optimizer steps in the same order. Each version is printed "
        "once its weights are those of the run to the last bit; another one ends the command with code 13. With "
        "key=value words a second learner trains by other rules on the same groups. Nothing of the run changes.",
        "asyncrl replay demo --until 50",
        (
            option("run", metavar="RUN", help=RUN),
            option(
                "--until",
                type=int,
                metavar="VERSION",
                help="the last version to make; by default the run's last",
            ),
        ),
        takes_config=False,
        takes_keys=True,
    ),
    "bisect": Command(
        _bisect,
        "where two runs part",
        "Name the first difference between two runs that have recorded their decisions: a decision, a token, a "
        "gradient or a weight. For two commits or machines, make both runs with queue.max_staleness=0. Exit code 13 "
        "if there is one.",
        "asyncrl bisect before after",
        (
            option("first", metavar="RUN", help=RUN),
            option("second", metavar="RUN", help="another one"),
        ),
        takes_config=False,
    ),
}
