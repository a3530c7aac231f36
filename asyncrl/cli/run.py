"""`asyncrl demo` and `asyncrl train`: a whole run, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncrl.cli.command import Arguments, Command, loading, option, read_config

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


def _train(arguments: Arguments) -> int:
    from asyncrl.launch.folder.run_folder import refuse_own_config

    arguments.overrides += timings(arguments)
    config = read_config(arguments)
    refuse_own_config(arguments.config, config)
    loading(arguments, f"the tasks, and what is needed to check {arguments.config}")
    if arguments.on is None:
        return _run(config)
    if arguments.on == "slurm":
        from asyncrl.cluster.slurm.run import train_on_slurm

        return _run(config, train_on_slurm)
    from asyncrl.cluster.ray.run import train_on_ray

    return _run(config, partial(train_on_ray, address=arguments.ray_address, gpus=arguments.ray_gpus))


def _demo(arguments: Arguments) -> int:
    from asyncrl.demo import check_folder, clear_folder, demo, warm_up

    engine = [f"generator.engine={arguments.engine}"] if arguments.engine else []
    words = [*engine, *arguments.overrides, *timings(arguments)]
    planned = demo(arguments.dir, words, arguments.recipe)
    print(planned.plan(trains=not arguments.warm_up), flush=True)
    if arguments.warm_up:
        warm_up(planned)
        return 0
    check_folder(planned)
    warm_up(planned)
    clear_folder(planned)
    return _run(planned.config)


def timings(arguments: Arguments) -> list[str]:
    return ["launch.timings=true"] if arguments.timings else []


def _run(config: Config, train: Callable[[Config], dict[str, Any]] | None = None) -> int:
    """train: starts the run and waits for its end; none: on this machine"""
    from asyncrl.launch.processes import begin_imports

    if train is None:
        begin_imports(config)
    from asyncrl.launch import local_run
    from asyncrl.launch.folder.run_folder import run_folder
    from asyncrl.launch.preflight import preflight
    from asyncrl.launch.views.dashboard import print_summary
    from asyncrl.rpc.keys import client_keys, server_keys

    preflight(config)
    server_keys(config.queue.keys), client_keys(config.queue.keys)
    print_summary((train or local_run.train)(config), run_folder(config))
    return 0


def _scale(arguments: Arguments) -> int:
    from asyncrl.launch.folder.scale import ScaleRequest, scale

    request = ScaleRequest(arguments.count, arguments.pool)
    print(f"{scale(arguments.run_folder, request)}: from now on {request}")
    return 0


TIMINGS = option(
    "--timings",
    action="store_true",
    help="print what each stage of the start took, once the first version is trained (launch.timings)",
)

COMMANDS: dict[str, Command] = {
    "demo": Command(
        _demo,
        "train a small model on this machine, about 5 minutes",
        "Make a small model, warm it up on two-digit addition and train it with GRPO in separate processes: "
        "queue, learner and generator. It needs two CPU cores, no GPU, no checkout and no download. The warm-up is "
        "made once; an earlier run in DIR/demo is replaced, one of another run.name never. "
        "With --recipe, the model learns something else: docs/recipes.md.",
        "asyncrl demo queue.max_staleness=8 run.name=eight",
        (
            option(
                "--recipe",
                default="addition",
                metavar="NAME",
                help="addition (the default), iteration, pictures, python, search, sokoban or webshop",
            ),
            option(
                "--dir", default="runs", metavar="DIR", help="holds the model and the run; runs/ unless given"
            ),
            option("--engine", metavar="NAME", help="of the generator, e.g. vllm; transformers unless given"),
            option(
                "--warm-up",
                action="store_true",
                help="make the warmed-up model, and stop before the training",
            ),
            TIMINGS,
        ),
        takes_config=False,
        takes_keys=True,
    ),
    "train": Command(
        _train,
        "run everything on this machine",
        "Start the queue, the learner and the generators on this machine, watch over them and show how "
        "the run goes. Everything it leaves lies in <run.dir>/<run.name>. Ctrl-C stops it with a "
        "checkpoint, run.resume=true goes on; Ctrl-C twice kills it.",
        "asyncrl train configs/recipes/demo.yaml run.name=mine queue.max_staleness=0",
        (
            option(
                "--on",
                choices=["ray", "slurm"],
                help="start the processes on a cluster: docs/ray.md, docs/slurm.md",
            ),
            option(
                "--ray-address",
                default="auto",
                metavar="ADDRESS",
                help="host:port of the Ray cluster; auto (the default): the one that this machine belongs to",
            ),
            option(
                "--ray-gpus",
                choices=["auto", "yes", "no"],
                default="auto",
                help="whether ranks with a model get a GPU each; auto (the default): if the cluster has any",
            ),
            TIMINGS,
        ),
    ),
    "scale": Command(
        _scale,
        "more or fewer generators for a run that goes on",
        "Have the launcher of a run start generators, or let the last ones leave, until there are N. One that leaves "
        "takes no more tasks, finishes those it has within generator.grace_s, and hands over what it has made of the "
        "others. Only for runs of `asyncrl train`; elsewhere start `asyncrl generator`, and end it with SIGTERM.",
        "asyncrl scale demo 2",
        (
            option("run_folder", metavar="RUN", help="folder of a run, or its name under runs/"),
            option("count", metavar="N", type=int, help="generators from now on"),
            option(
                "--pool", default="", metavar="NAME", help="of placement.generators, unless of `generator`"
            ),
        ),
        takes_config=False,
    ),
}
