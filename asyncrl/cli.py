"""The command line. Every command imports what it needs when it runs, so that `asyncrl --help` stays fast."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import errno
import importlib
import json
import logging
import os
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import AsyncRLError, ConfigError, RunClosedError
from asyncrl.launch.views.output import drop_output, lasting_output
from asyncrl.stop_signals import stop_signals

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

Arguments = argparse.Namespace

ABOUT = """\
Train language models with reinforcement learning while generation never stops.

A first try, about 5 minutes on two CPU cores:

  asyncrl demo

On one machine, one command runs everything:

  asyncrl train configs/recipes/demo.yaml

On several machines each process is started by hand, with the same configuration and the broker's address:

  asyncrl keys KEYS     # once, on the queue's machine; the others get a folder KEYS with client.key alone
  asyncrl queue CONFIG queue.keys=KEYS queue.address=tcp://10.0.0.1:5555
  torchrun --nproc-per-node 8 -m asyncrl learner CONFIG queue.keys=KEYS queue.address=tcp://10.0.0.1:5555
  asyncrl generator CONFIG queue.keys=KEYS queue.address=tcp://10.0.0.1:5555 --name generator-0
  asyncrl pool CONFIG MODEL queue.keys=KEYS queue.address=tcp://10.0.0.1:5555   # for what `placement` has on a pool

10.0.0.1 is the queue's machine. The learner offers its weights at the address of its route there, or at sync.host.
"""

EXIT_CODES = """\
exit codes:
  0    done, or the run was closed; a queue, generator or pool that SIGTERM or SIGHUP has stopped
  1    a bug: please report the traceback
  2    bad input: the command line, the configuration, the tasks
  4    a wait ran out; the message says who waited for whom
  5    a process of the run died; the message has the end of its log. One that ended with another of these
       codes ends `asyncrl train` with the same (ranks under torchrun: with 5)
  6    weights did not arrive whole, or arrived wrong
  7    a loss or gradient that must not be trained on
  8    the queue refused this process, e.g. one of another run
  9    the disk is full, or a folder cannot be written
  10   stopped by SIGTERM or SIGHUP (its terminal was closed) and saved: run.resume=true goes on
  11   a pool that trains a model is gone: start the learner again, from its newest checkpoint
  130  interrupted with Ctrl-C: a generator or pool has returned its leases, a learner has written a checkpoint
"""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
DISK_EXIT_CODE = 9
INTERRUPTED = 130

OUTLIVE_READERS = ("demo", "train", "queue", "generator", "pool", "learner")
"""Commands that go on when nobody reads their output any more."""

NO_READER_EXIT_CODE = 141
"""As a shell has it for a command that SIGPIPE has ended, e.g. one piped into head."""


@dataclass(frozen=True, slots=True)
class Command:
    """`about`: one line for the list of commands · `text`: its own --help · `options`: adds to CONFIG · `operand`: a
    word after CONFIG · `takes_keys`: key=value words without CONFIG."""

    run: Callable[[Arguments], int]
    about: str
    text: str
    example: str
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    takes_config: bool = True
    config_optional: bool = False
    operand: str | None = None
    takes_keys: bool = False


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Expected errors are one message on stderr, no traceback."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from asyncrl.launch.supervise import die_with_parent

        die_with_parent()
    arguments = parse(sys.argv[1:] if words is None else words)
    if arguments.command in OUTLIVE_READERS:
        with lasting_output():
            return _exit_code(arguments)
    try:
        code = _exit_code(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        drop_output(sys.stdout)
        return NO_READER_EXIT_CODE


def _exit_code(arguments: Arguments) -> int:
    """Run the command; its expected errors become messages and exit codes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.captureWarnings(True)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except RunClosedError as closed:
        print(f"asyncrl {arguments.command}: {closed or 'the run is over'}", file=sys.stderr)
        return 0
    except AsyncRLError as error:
        for each in error.each if isinstance(error, ConfigError) else (error,):
            _report(arguments, f"{type(each).__name__}: {each}")
        return error.exit_code
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _report(arguments, f"cannot write: {error}")
        return DISK_EXIT_CODE
    except KeyboardInterrupt:
        print(f"asyncrl {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _report(arguments: Arguments, error: str) -> None:
    """Print why the command ends, on stderr, and give it to torchrun: it prints it as the root cause below its own
    traceback, where a reader looks first."""
    from asyncrl.launch.views.output import without_control

    message = f"asyncrl {arguments.command}: {without_control(error)}"
    print(message, file=sys.stderr)
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


def parse(words: Sequence[str]) -> Arguments:
    """key=value words may stand anywhere after CONFIG. Exits with 2 on words that mean nothing."""
    parser = build_parser()
    if " ".join(words[:2]) in COMMANDS:  # 'queue status'
        words = [" ".join(words[:2]), *words[2:]]
    if words and (near := _nearest_command(words[0])):
        parser.error(f"there is no command {words[0]}; did you mean {near}?")
    arguments, rest = parser.parse_known_args(words)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    command = COMMANDS[arguments.command]
    if len(overrides) < len(rest) or (rest and not (command.takes_config or command.takes_keys)):
        parser.error(f"{arguments.command} does not take {' '.join(w for w in rest if w not in overrides)}")
    if COMMANDS[arguments.command].config_optional and not (arguments.config or arguments.schema):
        parser.error("the following arguments are required: CONFIG")
    if rest:
        arguments.overrides = [*arguments.overrides, *overrides]
    return arguments


def _nearest_command(word: str) -> str | None:
    """The command that is meant by a word that is none, if one is spelled alike."""
    if word.startswith("-") or word in COMMANDS:
        return None
    return next(iter(difflib.get_close_matches(word, COMMANDS, n=1)), None)


def build_parser() -> argparse.ArgumentParser:
    plain = partial(argparse.RawDescriptionHelpFormatter, max_help_position=14)
    parser = argparse.ArgumentParser("asyncrl", description=ABOUT, epilog=EXIT_CODES, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.about,
            description=textwrap.fill(command.text, 100),
            epilog=f"example:\n  {command.example}",
            formatter_class=plain,
        )
        if command.takes_config:
            count = "?" if command.config_optional else None
            sub.add_argument("config", metavar="CONFIG", help="YAML file", nargs=count)
            if command.operand:
                sub.add_argument(command.operand, metavar=command.operand.upper())
        if command.takes_config or command.takes_keys:
            sub.add_argument(
                "overrides",
                metavar="key=value",
                nargs="*",
                default=[],
                help="set a key, e.g. batch.groups=32",
            )
        command.options(sub)
    return parser


def _config(arguments: Arguments) -> Config:
    from asyncrl.config.load import load_config

    return load_config(arguments.config, arguments.overrides)


def _split_run_config(arguments: Arguments) -> Config:
    """For a process that must find the broker. Raises ConfigError unless its address is a concrete one."""
    config = _config(arguments)
    if "*" in config.queue.address:
        raise ConfigError(
            "queue.address",
            config.queue.address,
            f"`asyncrl {arguments.command}` must know where the broker listens",
            "give the address that `asyncrl queue` prints, e.g. queue.address=tcp://10.0.0.1:5555",
        )
    return config


def _loading(arguments: Arguments, what: str) -> None:
    """The first sign of life of a command: what it imports and loads next takes seconds. On stderr, so that stdout
    keeps what programs read; not from a process that `asyncrl train` has started, nor from every rank."""
    if "ASYNCRL_LAUNCHED" not in os.environ and os.environ.get("RANK", "0") == "0":
        print(f"asyncrl {arguments.command}: loading {what} …", file=sys.stderr, flush=True)


def _train(arguments: Arguments) -> int:
    from asyncrl.launch.folder.run_folder import refuse_own_config

    config = _config(arguments)
    refuse_own_config(arguments.config, config)
    _loading(arguments, f"the tasks, and what is needed to check {arguments.config}")
    return _run_here(config)


def _demo(arguments: Arguments) -> int:
    from asyncrl.demo import check, clear, demo, warm_up

    engine = [f"generator.engine={arguments.engine}"] if arguments.engine else []
    planned = demo(arguments.dir, [*engine, *arguments.overrides])
    print(planned.plan(trains=not arguments.warm_up), flush=True)
    if arguments.warm_up:
        warm_up(planned)
        return 0
    check(planned)
    warm_up(planned)
    clear(planned)
    return _run_here(planned.config)


def _run_here(config: Config) -> int:
    from asyncrl.launch.checks.preflight import preflight
    from asyncrl.launch.folder.run_folder import run_folder
    from asyncrl.launch.local import train
    from asyncrl.launch.views.dashboard import print_summary
    from asyncrl.rpc.keys import client_keys, server_keys

    preflight(config)
    server_keys(config.queue.keys), client_keys(config.queue.keys)
    print_summary(train(config), run_folder(config))
    return 0


def _queue(arguments: Arguments) -> int:
    config = _config(arguments)
    from asyncrl.launch.queue_process import run_queue
    from asyncrl.launch.views.process_view import QueueView, shown
    from asyncrl.telemetry.status import ProcessStatus

    status = ProcessStatus()
    with shown("queue", QueueView(status), status, config):
        run_queue(config, arguments.announce, arguments.anew, status)
    return 0


def _queue_status(arguments: Arguments) -> int:
    from asyncrl.launch import operate

    target = operate.find(arguments.target, arguments.keys)
    status = operate.status(target)
    if arguments.json:
        print(json.dumps(status, default=repr))
    else:
        operate.print_status(status, target.address)
    return 0


def _queue_inspect(arguments: Arguments) -> int:
    from asyncrl.launch import operate

    target = operate.find(arguments.target, arguments.keys)
    peek = operate.peek(target, arguments.stream, arguments.ordinal)
    decode = operate.decoder(target.config) if peek.group is not None else None
    for line in operate.show(peek, arguments.ordinal, decode):
        print(line)
    return 0


def _queue_drain(arguments: Arguments) -> int:
    from asyncrl.launch import operate

    dropped = operate.drain(operate.find(arguments.target, arguments.keys), arguments.stream)
    print(f"{dropped} pending tasks dropped; what is under way will be finished, then the run ends")
    return 0


def _sync_plan(arguments: Arguments) -> int:
    config = _config(arguments)
    from asyncrl.launch.sync_plan import show

    show(config, arguments.model, arguments.learner, arguments.generators)
    return 0


def _keys(arguments: Arguments) -> int:
    from asyncrl.rpc.keys import make_keys

    make_keys(Path(arguments.folder))
    print(
        f"{arguments.folder}: server.key for the queue's machine alone, client.key for all machines of the run.\n"
        f"Every process gets queue.keys={arguments.folder}"
    )
    return 0


def _check_process_name(name: str) -> None:
    """Some engines name a folder after the process."""
    from asyncrl.config.sections.rules import check_name

    check_name("--name", name)


def _generator(arguments: Arguments) -> int:
    config = _split_run_config(arguments)
    _check_process_name(arguments.name)
    _loading(arguments, f"torch and the model {config.model.path}")
    from asyncrl.generator.process import run_generator
    from asyncrl.launch.views.process_view import GeneratorView, shown
    from asyncrl.tasks.source import held_out
    from asyncrl.telemetry.status import ProcessStatus

    status, name = ProcessStatus(), arguments.name
    with shown(name, GeneratorView(status), status, config):
        work = run_generator(config, name=name, held_out=held_out(config), status=status)
        asyncio.run(_until_sigterm(work))
    return 0


def _pool(arguments: Arguments) -> int:
    config = _split_run_config(arguments)
    name = arguments.name or f"{arguments.model}-{socket.gethostname()}-{os.getpid()}"
    _check_process_name(name)
    _loading(arguments, f"torch and what the pool of the {arguments.model} needs")
    from asyncrl.launch.views.process_view import PoolView, shown
    from asyncrl.pool.process import run_pool
    from asyncrl.telemetry.status import ProcessStatus

    status = ProcessStatus()
    with shown(name, PoolView(status), status, config):
        asyncio.run(_until_sigterm(run_pool(config, arguments.model, name=name, status=status)))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from asyncrl.learner.backends.fsdp.fsdp import end_rank

        end_rank()
    return 0


def _learner(arguments: Arguments) -> int:
    from asyncrl.launch.folder.run_folder import claimed_by_learner

    config = _split_run_config(arguments)
    by_hand = "ASYNCRL_LAUNCHED" not in os.environ and os.environ.get("RANK", "0") == "0"
    with claimed_by_learner(config, arguments.config) if by_hand else nullcontext():
        return _learn(arguments, config)


def _learn(arguments: Arguments, config: Config) -> int:
    _loading(arguments, f"torch and the model {config.model.path}")
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


def _show_config(arguments: Arguments) -> int:
    if arguments.schema:
        from asyncrl.config.json_schema import schema_text

        print(schema_text())
        return 0
    config = _config(arguments)
    if arguments.print:
        from asyncrl.config.docs import render

        print(render(config, show_passwords=False))
        return 0
    if not arguments.rules_only:
        _loading(arguments, f"the tasks, and what is needed to check {arguments.config}")
        from asyncrl.launch.checks.preflight import preflight

        preflight(config)
    print(f"{arguments.config}: valid; --print shows every key")
    return 0


def _completion(arguments: Arguments) -> int:
    from asyncrl.config.completion import script

    options = {name: _words_of(name) for name in COMMANDS}
    takes_config = {name for name, command in COMMANDS.items() if command.takes_config}
    print(script(arguments.shell, options, takes_config), end="")
    return 0


def _words_of(command: str) -> list[str]:
    """The options of a command, as they are written."""
    parser = argparse.ArgumentParser(add_help=False)
    COMMANDS[command].options(parser)
    return [word for action in parser._actions for word in action.option_strings if word.startswith("--")]


def _algorithms(arguments: Arguments) -> int:
    catalogue = importlib.import_module("asyncrl.learner.algorithms.catalogue")
    print(catalogue.as_markdown() if arguments.markdown else catalogue.as_text())
    return 0


def _sft(arguments: Arguments) -> int:
    config = _config(arguments)
    _loading(arguments, f"torch and the model {config.model.path}")
    importlib.import_module("asyncrl.sft").run(config)
    return 0


def _export(arguments: Arguments) -> int:
    from asyncrl.launch.folder.run_folder import config_of, find_run

    run = find_run(arguments.run)
    config = config_of(run) if arguments.config is None else _config(arguments)
    _loading(arguments, f"torch and the checkpoint of {run}")
    export = importlib.import_module("asyncrl.learner.export").export
    version = export(config, run, Path(arguments.folder), arguments.version)
    print(f"{arguments.folder}: the policy of version {version} of {run}, for transformers")
    return 0


def _eval(arguments: Arguments) -> int:
    config = _config(arguments)
    _loading(arguments, f"torch and the model {arguments.model}")
    print(json.dumps(importlib.import_module("asyncrl.evaluate").run(config, arguments.model), indent=2))
    return 0


def _generate(arguments: Arguments) -> int:
    config = _config(arguments)
    _loading(arguments, f"torch and the model {arguments.model}")
    evaluate = importlib.import_module("asyncrl.evaluate")
    for text in evaluate.generate(config, arguments.model, arguments.prompt):
        print(text)
    return 0


def _bench(arguments: Arguments) -> int:
    _loading(arguments, f"the benchmark {arguments.theme}")
    return importlib.import_module(f"asyncrl.bench.{arguments.theme}").main(arguments.words) or 0


async def _until_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """SIGTERM, SIGHUP and Ctrl-C cancel the work, which then gives back what it holds. Ctrl-C again ends it at once."""
    task, told = asyncio.ensure_future(work), asyncio.Event()

    def stop() -> None:
        if not told.is_set():  # a terminal that closes can send several signals
            told.set()
            task.cancel()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not told.is_set():  # asyncio.run makes a KeyboardInterrupt of it
            raise


def _queue_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--announce",
        type=int,
        metavar="FD",
        help="write the address to this file descriptor once it is bound",
    )
    parser.add_argument(
        "--anew", action="store_true", help="forget what a queue of this run has left in its journal"
    )


def _target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN", help="folder of a run, its name under runs/, or an address")
    parser.add_argument("--keys", metavar="DIR", help="queue.keys of the run, where its folder does not say")


def _status_options(parser: argparse.ArgumentParser) -> None:
    _target_options(parser)
    parser.add_argument("--json", action="store_true", help="all that the queue tells, as JSON")


def _stream_options(parser: argparse.ArgumentParser) -> None:
    _target_options(parser)
    parser.add_argument("--stream", default="train", help="'train' (as it is unless given) or 'eval'")


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    _stream_options(parser)
    parser.add_argument("ordinal", type=int, metavar="ORDINAL", help="of the task in the stream")


def _sync_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="folder with a config.json, in place of model.path; weights are not read",
    )
    parser.add_argument(
        "--learner",
        metavar="WORDS",
        help="its ranks, e.g. 'replicate 2 fsdp 64 tp 4 ep 16' (experts dealt out to 16 of the fsdp ranks); "
        "unless given, as learner.processes and learner.parallel have it",
    )
    parser.add_argument(
        "--generators",
        metavar="WORDS",
        help="how many, and the ranks of one, e.g. '64 tp 8 ep 8 host 8' (host: ranks on one machine); "
        "unless given, generator.count of one rank",
    )


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", default="runs", metavar="DIR", help="holds the model and the run; runs/ unless given"
    )
    parser.add_argument(
        "--engine", metavar="NAME", help="of the generator, e.g. vllm; transformers unless given"
    )
    parser.add_argument(
        "--warm-up", action="store_true", help="make the warmed-up model, and stop before the training"
    )


def _keys_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="is made if it is not there")


def _generator_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name",
        default=f"generator-{socket.gethostname()}-{os.getpid()}",
        help="unique among the run's generators",
    )


def _pool_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="unique among the run's processes")


def _config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--print", action="store_true", help="show every key, its value and what it is for")
    parser.add_argument(
        "--rules-only",
        action="store_true",
        help="do not look whether data, models, functions and GPUs are here: for a configuration of another machine",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of configurations, for editors"
    )


def _completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def _algorithms_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="as in docs/algorithms.md, with every key")


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="Hugging Face folder, e.g. runs/demo/final"
    )


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name under runs/")
    parser.add_argument("folder", metavar="DIR", help="is made")
    parser.add_argument("--version", type=int, metavar="N", help="of the checkpoint; the newest unless given")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="of the run, where its folder has no config.yaml or models have moved",
    )
    parser.set_defaults(overrides=[])


def _generate_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    parser.add_argument("--prompt", required=True, action="append", metavar="TEXT", help="may be repeated")


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("theme", choices=["utilization", "climb"])
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="…", help="passed on to the benchmark")


COMMANDS: dict[str, Command] = {
    "demo": Command(
        _demo,
        "train a small model on this machine, about 5 minutes",
        "Make a small model, warm it up on two-digit addition and train it with GRPO in separate processes: "
        "queue, learner and generator. It needs two CPU cores, no GPU, no checkout and no download. The warm-up is "
        "made once; an earlier run in DIR/demo is replaced, one of another run.name never.",
        "asyncrl demo queue.max_staleness=8 run.name=eight",
        _demo_options,
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
    ),
    "queue": Command(
        _queue,
        "the transfer queue of a run",
        "Serve tasks to generators and their groups to the learner, until SIGTERM. Start it first: "
        "everything else finds each other through its address, which it prints and writes to "
        "<run.dir>/<run.name>/address. Started again after it died, it goes on from its journal "
        "(queue.store).",
        "asyncrl queue configs/recipes/demo.yaml queue.address=tcp://127.0.0.1:5555",
        _queue_options,
    ),
    "queue status": Command(
        _queue_status,
        "how a queue stands",
        "Tasks and groups in each state, ages, leases by generator, what was dropped and refused and why, bytes, "
        "and how far generators work ahead, of a run that is going on.",
        "asyncrl queue status demo",
        _status_options,
        takes_config=False,
    ),
    "queue inspect": Command(
        _queue_inspect,
        "one task of a queue",
        "Show where a task stands, and what was made of it: prompt, texts (token ids if the run's tokenizer is not "
        "at hand), rewards, versions. Nothing changes by it.",
        "asyncrl queue inspect demo 117",
        _inspect_options,
        takes_config=False,
    ),
    "queue drain": Command(
        _queue_drain,
        "end a run early",
        "Lease no more tasks, drop those that are pending, finish and train what is under way.",
        "asyncrl queue drain demo",
        _stream_options,
        takes_config=False,
    ),
    "sync plan": Command(
        _sync_plan,
        "what a weight update will cost",
        "Plan one update of all generators from the shapes of a model alone, for pools of any size: who sends how "
        "much, through how many streams and hops, how long it takes over links of sync.network_gb_s and "
        "sync.local_gb_s, and the memory it needs. Nothing is started.",
        "asyncrl sync plan configs/recipes/demo.yaml --model configs/models/deepseek_v3 model.dtype=bfloat16 "
        "--learner 'fsdp 512 ep 64' --generators '64 tp 8'",
        _sync_plan_options,
    ),
    "keys": Command(
        _keys,
        "make the keys of a queue",
        "Make a key pair for the queue and one for everybody else, for runs over several machines: without "
        "queue.keys a queue listens on loopback only.",
        "asyncrl keys ~/.asyncrl/keys",
        _keys_options,
        takes_config=False,
    ),
    "generator": Command(
        _generator,
        "one generator of a run",
        "Turn tasks into scored rollouts, with the newest weights, until the run is over. Any number may "
        "join and leave while the run goes on.",
        "asyncrl generator configs/recipes/demo.yaml queue.address=tcp://127.0.0.1:5555 --name generator-0",
        _generator_options,
    ),
    "pool": Command(
        _pool,
        "one process of a pool: a model beside the policy",
        "Work on groups that wait in the queue until the run is over: what MODEL says of them (reference, teacher, "
        "reward_model, critic, cost_critic), or their rewards (MODEL is then 'rewards'). For what the section "
        "`placement` has on a pool. Any number may join and leave while the run goes on; of a model that learns "
        "there is one process.",
        "asyncrl pool configs/recipes/demo.yaml reference queue.address=tcp://127.0.0.1:5555",
        _pool_options,
        operand="model",
    ),
    "learner": Command(
        _learner,
        "the learner of a run",
        "Train on groups as they arrive and publish each version of the policy. For several ranks start "
        "it with torchrun. SIGTERM makes it write a checkpoint and end the run.",
        "torchrun --nproc-per-node 2 -m asyncrl learner CONFIG queue.address=tcp://127.0.0.1:5555",
    ),
    "config": Command(
        _show_config,
        "check a configuration, or explain it",
        "Read a configuration with its includes and overrides, check every rule, and look whether the data, models, "
        "functions and GPUs that it names are here and fit, without starting anything. Keys that would do nothing are "
        "named. --print and --rules-only leave the looking out.",
        "asyncrl config configs/recipes/demo.yaml queue.max_staleness=4 --print",
        _config_options,
        config_optional=True,
    ),
    "completion": Command(
        _completion,
        "completion of commands and keys in your shell",
        "Print a script by which bash, zsh or fish complete commands, options, CONFIG files, key= names and the values "
        "that a key chooses from. bash and zsh: put the line below into ~/.bashrc or ~/.zshrc with your shell's name; "
        "fish: asyncrl completion fish > ~/.config/fish/completions/asyncrl.fish",
        'eval "$(asyncrl completion bash)"',
        _completion_options,
        takes_config=False,
    ),
    "algorithms": Command(
        _algorithms,
        "every advantage, loss and correction there is",
        "List the values of algorithm.advantage, algorithm.loss and algorithm.correction with their "
        "definition, their paper and what they need. Whole algorithms are in configs/algorithms.",
        "asyncrl algorithms",
        _algorithms_options,
        takes_config=False,
    ),
    "sft": Command(
        _sft,
        "supervised warm-up",
        "Train on the 'target' texts of the tasks until sft.until_accuracy or sft.steps, and write the "
        "model to sft.output.",
        "asyncrl sft configs/recipes/sft_addition.yaml",
    ),
    "export": Command(
        _export,
        "make a model of a checkpoint",
        "Write the policy of a checkpoint as a Hugging Face folder: weights, config, tokenizer, adapters if there are "
        "any. In one process on the CPU, whatever saved it; for a run that ended without final/, or an older version.",
        "asyncrl export demo --version 50 demo-at-50",
        _export_options,
        takes_config=False,
    ),
    "eval": Command(
        _eval,
        "score a model on the held-out tasks",
        "Answer the held-out tasks of evaluation.source and evaluation.sets with a model, sampled as these say, and "
        "print the scores as JSON.",
        "asyncrl eval configs/recipes/demo.yaml --model runs/demo/final",
        _model_options,
    ),
    "generate": Command(
        _generate,
        "answer prompts with a model",
        "Print the answer of a model to each prompt, with the engine and the sampling of the configuration.",
        "asyncrl generate configs/recipes/demo.yaml --model runs/demo/final --prompt 47+85=",
        _generate_options,
    ),
    "bench": Command(
        _bench,
        "measure",
        "Run one of the benchmarks that need real processes; words after the theme are its own.",
        "asyncrl bench utilization --help",
        _bench_options,
        takes_config=False,
    ),
}
