"""`asyncrl plan`: a run predicted before it is started."""

from __future__ import annotations

from asyncrl.cli.command import Arguments, Command, option, read_config


def _plan(arguments: Arguments) -> int:
    config = read_config(arguments)
    from asyncrl.launch.run_plan import print_plan

    print_plan(config, arguments.devices, arguments.run_of, arguments.times, arguments.save, arguments.json)
    return 0


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise ValueError
    return number


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
                type=_count,
                required=True,
                help="of generators and learner together",
            ),
            option("--from", dest="run_of", metavar="RUN", help="folder of a run, or its name under runs/"),
            option("--times", metavar="FILE", help="YAML file with stage times, in place of a run"),
            option("--save", metavar="FILE", help="write the stage times there, for --times"),
            option("--json", action="store_true", help="for programs"),
        ),
    ),
}
