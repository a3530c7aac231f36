"""Commands on the records of a run: its groups and its decisions, looked at, made again, compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cli.command import Arguments, Command, loading, option

if TYPE_CHECKING:
    from asyncrl.replay.replayed_learner import Replayed


def _groups(arguments: Arguments) -> int:
    from asyncrl.launch import operate
    from asyncrl.launch.folder.run_folder import config_of, find_run
    from asyncrl.learner.reporting.saved_groups import FOLDER, load_groups
    from asyncrl.queue.protocol.replies import Peek

    given = [Path(path) if Path(path).exists() else find_run(path) for path in arguments.paths]
    paths = [path / FOLDER if (path / FOLDER).is_dir() else path for path in given]
    run = next((each for each in paths[0].resolve().parents if (each / "config.yaml").is_file()), None)
    decode = None if run is None else operate.decoder(config_of(run))
    for group in load_groups(paths):
        for line in operate.task_lines(
            Peek("saved", group.task, None, None, group, None), group.task.ordinal, decode
        ):
            print(line)
    return 0


def _retrain(arguments: Arguments) -> int:
    from asyncrl.config.load import load_config
    from asyncrl.launch.folder.run_folder import config_of, find_run
    from asyncrl.learner.reporting.report import ROWS
    from asyncrl.telemetry.sinks import read_rows

    run, version = find_run(arguments.run), arguments.version
    config_of(run)
    config = load_config(run / "config.yaml", arguments.overrides)
    loading(arguments, f"torch and a checkpoint of {run}")
    from asyncrl.launch.views.dashboard import print_comparison
    from asyncrl.learner.retrain import retrain

    began, report = retrain(config, run, version, [Path(path) for path in arguments.groups or ()])
    recorded = next(
        (row for row in read_rows(run / ROWS) if row.get("version") == version and "train/loss" in row), {}
    )
    if arguments.json:
        print(
            json.dumps(
                {"policy": began, "refused": report.refused, "again": dict(report.values), "run": recorded}
            )
        )
        return 0
    if began != version - 1:
        print(f"the policy is that of version {began}: the run keeps no checkpoint of version {version - 1}")
    if report.refused:
        print(f"the step was refused: {report.refused}")
    print_comparison(f"version {version} of {run}", recorded, report.values)
    return 0


def _replay(arguments: Arguments) -> int:
    from asyncrl.launch.folder.run_folder import config_of, find_run

    run = find_run(arguments.run)
    config_of(run)
    loading(arguments, f"torch and the model of {run}")
    return asyncio.run(_made_again(run, arguments.until, arguments.overrides, arguments.saved_groups))


async def _made_again(run: Path, until: int | None, keys: Sequence[str], saved: bool) -> int:
    from asyncrl.errors import DivergedError
    from asyncrl.replay.replay import replay
    from asyncrl.replay.what_if import WhatIf

    what_if = WhatIf(run, keys) if keys else None
    versions = 0
    async for made in replay(run, until, keys, None if what_if is None else what_if.model, saved):
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
    "groups": Command(
        _groups,
        "groups in files",
        "Show groups that a run has saved in groups/ (telemetry.groups_every, and those with numbers that are not "
        "finite), or that `asyncrl queue inspect --save` wrote: prompts, texts, rewards, versions.",
        "asyncrl groups runs/demo/groups/v000010",
        (option("paths", nargs="+", metavar="PATH", help="file of a group, folder of such, or a run"),),
        takes_config=False,
    ),
    "retrain": Command(
        _retrain,
        "make a step of a run again",
        "Train on saved groups of a version once more, in this process, from the newest checkpoint before it, and "
        "print the metrics beside those of the run. With key=value words the step is made otherwise, e.g. with another "
        "loss. Nothing of the run changes.",
        "asyncrl retrain demo 10 algorithm.loss=gspo",
        (
            option("run", metavar="RUN", help=RUN),
            option("version", type=int, metavar="VERSION", help="that the step published"),
            option(
                "--groups",
                nargs="+",
                metavar="PATH",
                help="files or folders, in place of those of the version",
            ),
            option("--json", action="store_true", help="both rows as JSON"),
        ),
        takes_config=False,
        takes_keys=True,
    ),
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
            option(
                "--saved-groups",
                action="store_true",
                help="take groups from the run's files (telemetry.groups_every=1): for any engine",
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
