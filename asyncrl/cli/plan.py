"""`asyncrl plan` and `asyncrl tune`: a run predicted before it is started, and its keys found."""

from __future__ import annotations

from pathlib import Path

from asyncrl.cli.command import Arguments, Command, option, read_config
from asyncrl.config.rules import at_least


def _plan(arguments: Arguments) -> int:
    config = read_config(arguments)
    from asyncrl.launch.run_plan import print_run_plan

    print_run_plan(
        config, arguments.devices, arguments.run_of, arguments.times, arguments.save, arguments.json
    )
    return 0


def _tune(arguments: Arguments) -> int:
    from asyncrl.bench.tune import print_tuning, run_tuning

    tuning = run_tuning(
        arguments.config,
        arguments.overrides,
        Path(arguments.dir),
        arguments.versions,
        arguments.repetitions,
        arguments.devices,
    )
    print_tuning(tuning, Path(arguments.write) if arguments.write else None, arguments.config)
    return 0


COMMANDS: dict[str, Command] = {
    "plan": Command(
        _plan,
        "how to split devices into generators and learner, and what that is worth",
        "Simulate the run on the queue's own rules, synchronously and asynchronously, for the splits of N devices that "
        "the stage times put first, and print the fastest and the keys to set. Stage times come from a short real run, "
        "or from a file that you write for devices that you do not have. Nothing is started.",
        "asyncrl plan configs/recipes/demo.yaml --devices 8 --from demo",
        (
            option(
                "--devices",
                metavar="N",
                type=at_least(1),
                required=True,
                help="of generators and learner together",
            ),
            option("--from", dest="run_of", metavar="RUN", help="folder of a run, or its name under runs/"),
            option("--times", metavar="FILE", help="YAML file with stage times, in place of a run"),
            option("--save", metavar="FILE", help="write the stage times there, for --times"),
            option("--json", action="store_true", help="for programs"),
        ),
    ),
    "tune": Command(
        _tune,
        "max_staleness, depth, window, slots and the split of the pools that make a run fastest",
        "Make a short run of the configuration, simulate others from its stage times key by key, and compare the best "
        "with the given one in short runs by turns. Print which keys to set, and why.",
        "asyncrl tune configs/recipes/demo.yaml --write runs/tuned.yaml",
        (
            option(
                "--devices",
                metavar="N",
                type=at_least(1),
                help="to be split into the pools; unless given they stay",
            ),
            option(
                "--versions",
                metavar="N",
                type=at_least(1),
                default=20,
                help="of each run (default: %(default)s)",
            ),
            option(
                "--repetitions",
                metavar="N",
                type=at_least(0),
                default=2,
                help="of the comparison; 0: simulations alone (default: %(default)s)",
            ),
            option("--dir", default="runs/tune", help="where the run folders go (default: %(default)s)"),
            option(
                "--write",
                metavar="FILE",
                help="write a configuration that includes CONFIG and sets these keys",
            ),
        ),
    ),
}
