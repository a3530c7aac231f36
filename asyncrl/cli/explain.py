"""`asyncrl config`, `asyncrl algorithms` and `asyncrl recipes`."""

from __future__ import annotations

import json

from asyncrl.cli.command import Arguments, Command, loading, option, read_config


def _show_config(arguments: Arguments) -> int:
    if arguments.schema:
        from asyncrl.config.json_schema import schema

        print(json.dumps(schema(), indent=1, ensure_ascii=False))
        return 0
    config = read_config(arguments)
    if arguments.print:
        from asyncrl.config.commented_yaml import render

        print(render(config, show_passwords=False))
        return 0
    if not arguments.rules_only:
        loading(arguments, f"the tasks, and what is needed to check {arguments.config}")
        from asyncrl.launch.preflight import preflight

        preflight(config)
    print(f"{arguments.config}: valid; --print shows every key")
    if not arguments.rules_only and config.learner.own_backend is None:
        from rich.console import Console

        from asyncrl.launch.memory import placed_pools, placement_table

        Console().print(placement_table(placed_pools(config)))
    return 0


def _algorithms(arguments: Arguments) -> int:
    from asyncrl.learner.algorithms.catalogue import as_markdown, as_text

    print(as_markdown() if arguments.markdown else as_text())
    return 0


def _recipes(arguments: Arguments) -> int:
    from asyncrl.config.load import CONFIGS
    from asyncrl.config.recipes import recipe_heads

    for head in recipe_heads():
        print(f"{head.path.relative_to(CONFIGS.parent)}\n    {head.about}\n    {head.says['hardware']}")
    return 0


COMMANDS: dict[str, Command] = {
    "config": Command(
        _show_config,
        "check a configuration, or explain it",
        "Read a configuration with its includes and overrides, check every rule, and look whether the data, models, "
        "functions and GPUs that it names are here and fit, without starting anything. Keys that would do nothing are "
        "named. A table shows which pool has which devices, and the memory that a rank needs. --print and --rules-only "
        "leave the looking and the table out.",
        "asyncrl config configs/recipes/demo.yaml queue.max_staleness=4 --print",
        (
            option("--print", action="store_true", help="show every key, its value and what it is for"),
            option(
                "--rules-only",
                action="store_true",
                help="do not look whether data, models, functions and GPUs are here: for a configuration of another "
                "machine",
            ),
            option(
                "--schema", action="store_true", help="print the JSON Schema of configurations, for editors"
            ),
        ),
        config_optional=True,
    ),
    "algorithms": Command(
        _algorithms,
        "every advantage, loss and correction there is",
        "List the values of algorithm.advantage, algorithm.loss and algorithm.correction with their "
        "definition, their paper and what they need. Whole algorithms are in configs/algorithms.",
        "asyncrl algorithms",
        (option("--markdown", action="store_true", help="as in docs/algorithms.md, with every key"),),
        takes_config=False,
    ),
    "recipes": Command(
        _recipes,
        "configurations for real work",
        "List the configurations in configs/recipes: what each trains, and the hardware that it is for. The first "
        "comment of a file has its source, its command, and what in it is ours.",
        "asyncrl recipes",
        takes_config=False,
    ),
}
