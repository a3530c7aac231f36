"""Processes that work for a queue: generators, pools, the learner."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from asyncrl.cli.command import Arguments, Command, loading, option, split_run_config
from asyncrl.errors import ConfigError
from asyncrl.system.rank_process import end_rank, is_rank, rank_and_world
from asyncrl.system.signals import stop_signals

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.launch.ranks import RankShare


def _generator(arguments: Arguments) -> int:
    from asyncrl.config.sections.generator import errors_of_pool

    with errors_of_pool(arguments.pool):
        return _generate(arguments, split_run_config(arguments).of_pool(arguments.pool))


def _generate(arguments: Arguments, config: Config) -> int:
    name = _process_name(arguments, "-".join(filter(None, ("generator", arguments.pool))))
    loading(arguments, f"torch and the model {config.model.path}")
    from asyncrl.generator.process import run_generator
    from asyncrl.launch.views.process_view import GeneratorView, shown
    from asyncrl.tasks.source import held_out
    from asyncrl.telemetry.status import ProcessStatus

    status = ProcessStatus()
    with shown(name, GeneratorView(status), status, config, "generator"):
        leaving = asyncio.Event()
        work = run_generator(config, name=name, held_out=held_out(config), status=status, leaving=leaving)

        def leave() -> float:
            """The seconds that the generator has for the tasks that it has leased. Without any, it ends at once."""
            grace_s = config.generator.grace_s if status.loaded.is_set() else 0.0
            if grace_s:
                leaving.set()
            return grace_s

        asyncio.run(_until_sigterm(work, leave))
    return 0


def _pool(arguments: Arguments) -> int:
    config = split_run_config(arguments)
    from asyncrl.launch.ranks import RankShare

    place = config.placement.places.get(arguments.model)
    name = _process_name(arguments, arguments.model)
    share = RankShare(name, place.ranks if place else 1, arguments.nodes, arguments.node)
    if starts_ranks(share, f"{config.placement.key_of(arguments.model)}.ranks"):
        named = [] if arguments.name else ["--name", name]
        return run_own_ranks(arguments, config, share, *named)
    loading(arguments, f"torch and what the pool of the {arguments.model} needs")
    from asyncrl.launch.views.process_view import PoolView, shown
    from asyncrl.pool.process import run_pool
    from asyncrl.telemetry.status import ProcessStatus

    status = ProcessStatus()
    with shown(name, PoolView(status), status, config, arguments.model):
        asyncio.run(_until_sigterm(run_pool(config, arguments.model, name=name, status=status)))
    if rank_and_world()[1] > 1:
        end_rank()
    return 0


def _learner(arguments: Arguments) -> int:
    from asyncrl.launch.folder.run_folder import claimed_by_learner
    from asyncrl.launch.ranks import RankShare

    config = split_run_config(arguments)
    share = RankShare("learner", config.learner.processes, arguments.nodes, arguments.node)
    if starts_ranks(share, "learner.processes"):
        return run_own_ranks(arguments, config, share)
    by_hand = "ASYNCRL_LAUNCHED" not in os.environ and os.environ.get("RANK", "0") == "0"
    with claimed_by_learner(config, arguments.config) if by_hand else nullcontext():
        return _learn(arguments, config)


def _learn(arguments: Arguments, config: Config) -> int:
    loading(arguments, f"torch and the model {config.model.path}")
    from asyncrl.launch.folder.run_folder import run_folder
    from asyncrl.launch.views.process_view import LearnerView, shown
    from asyncrl.learner.process import run_learner
    from asyncrl.learner.training import requirements
    from asyncrl.tasks.source import held_out
    from asyncrl.telemetry.status import ProcessStatus

    requirements.check(config)
    heldout = {name: len(tasks) for name, tasks in held_out(config).items()}
    status = ProcessStatus()
    with shown("learner", LearnerView(config, run_folder(config), status), status, config):
        run_learner(config, heldout, status)
    return 0


def starts_ranks(share: RankShare, key: str) -> bool:
    """Whether this process is to start ranks, and is none itself. Raises ConfigError for --node and --nodes."""
    share.check(key)
    return share.world > 1 and not is_rank()


def run_own_ranks(arguments: Arguments, config: Config, share: RankShare, *words: str) -> int:
    from asyncrl.launch.processes import begin_imports
    from asyncrl.launch.ranks import run_ranks

    command = [sys.executable, "-m", "asyncrl", *arguments.command_line, *words]
    launch = config.launch
    return run_ranks(command, share, launch.rank_deadline_s, begin_imports(config), launch.start_deadline_s)


def _process_name(arguments: Arguments, kind: str) -> str:
    """`--name`, or one that no other process has. Some engines name a folder after it."""
    from asyncrl.config.rules import check_name

    if arguments.name is None and getattr(arguments, "nodes", 1) > 1:
        rule, remedy = "the ranks of several machines meet under it", "give each machine the same --name"
        raise ConfigError("--name", "", rule, remedy)
    default = f"{kind}-{socket.gethostname()}-{os.getpid()}"
    name = default if arguments.name is None else arguments.name
    check_name("--name", name)
    return name


async def _until_sigterm(work: Coroutine[Any, Any, None], leave: Callable[[], float] | None = None) -> None:
    """SIGTERM, SIGHUP and Ctrl-C cancel the work, which then gives back what it holds. Ctrl-C again ends it at once.

    leave: called at SIGTERM or SIGHUP; returns the seconds from then until the work is cancelled; None: at once
    """
    task, stopped, loop = asyncio.ensure_future(work), asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        if not stopped.is_set():  # a terminal that closes can send several signals
            stopped.set()
            loop.call_later(leave() if leave else 0.0, task.cancel)

    for number in stop_signals():
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped.is_set():  # asyncio.run makes a KeyboardInterrupt of it
            raise


NODES = (
    option("--nodes", type=int, default=1, help="machines that have the ranks in equal parts"),
    option("--node", type=int, default=0, help="the number of this machine among them, from 0"),
)

COMMANDS: dict[str, Command] = {
    "generator": Command(
        _generator,
        "one generator of a run",
        "Turn tasks into scored rollouts, with the newest weights, until the run is over. Any number may "
        "join and leave while the run goes on.",
        "asyncrl generator configs/recipes/demo.yaml queue.address=tcp://127.0.0.1:5555 --name generator-0",
        (
            option("--name", help="unique among the run's generators"),
            option(
                "--pool", default="", metavar="NAME", help="of placement.generators, whose keys then count"
            ),
        ),
    ),
    "pool": Command(
        _pool,
        "one process of a pool: a model beside the policy",
        "Work on groups that wait in the queue until the run is over: add the outputs of MODEL (reference, teacher, "
        "reward_model, critic, cost_critic, or one of placement.own), or their rewards (MODEL is then 'rewards'). For "
        "what the section `placement` has on a pool. Any number may join and leave while the run goes on; of a model "
        "that learns there is one process.",
        "asyncrl pool configs/recipes/demo.yaml reference queue.address=tcp://127.0.0.1:5555",
        (option("--name", help="unique among the run's processes"), *NODES),
        operand="model",
    ),
    "learner": Command(
        _learner,
        "the learner of a run",
        "Train on groups as they arrive and publish each version of the policy. It starts learner.processes ranks; "
        "on several machines give each the same configuration, --nodes and its own --node. SIGTERM makes it write a "
        "checkpoint and end the run.",
        "asyncrl learner configs/recipes/demo.yaml queue.address=tcp://127.0.0.1:5555 learner.processes=2",
        NODES,
    ),
}
