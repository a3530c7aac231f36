"""Commands on groups in files: look at them, train on them again."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.cli.command import Arguments, Command, loading, option


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
            option("run", metavar="RUN", help="folder of a run, or its name under runs/"),
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
}
