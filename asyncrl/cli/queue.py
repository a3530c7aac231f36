"""The queue's process, and commands that look into a queue or prepare it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from asyncrl.cli.command import Arguments, Command, option, read_config


def _queue(arguments: Arguments) -> int:
    config = read_config(arguments)
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
    for line in operate.task_lines(peek, arguments.ordinal, decode):
        print(line)
    if arguments.save is not None:
        operate.save_peek(peek, arguments.ordinal, Path(arguments.save))
    return 0


def _queue_drain(arguments: Arguments) -> int:
    from asyncrl.launch import operate

    dropped = operate.drain(operate.find(arguments.target, arguments.keys), arguments.stream)
    print(f"{dropped} pending tasks dropped; what is under way will be finished, then the run ends")
    return 0


def _sync_plan(arguments: Arguments) -> int:
    config = read_config(arguments)
    from asyncrl.launch.sync_plan import print_plan

    print_plan(config, arguments.model, arguments.learner, arguments.generators, arguments.device_gb)
    return 0


def _keys(arguments: Arguments) -> int:
    from asyncrl.rpc.keys import make_keys

    make_keys(Path(arguments.folder))
    print(
        f"{arguments.folder}: server.key for the queue's machine alone, client.key for all machines of the run.\n"
        f"Every process gets queue.keys={arguments.folder}"
    )
    return 0


TARGET = (
    option("target", metavar="RUN", help="folder of a run, its name under runs/, or an address"),
    option(
        "--keys",
        metavar="DIR",
        type=os.path.expanduser,
        help="queue.keys of the run, for an address or a run without its configuration",
    ),
)
STREAM = (
    *TARGET,
    option("--stream", default="train", help="'train' (as it is unless given) or 'eval'"),
)

COMMANDS: dict[str, Command] = {
    "queue": Command(
        _queue,
        "the transfer queue of a run",
        "Serve tasks to generators and their groups to the learner, until SIGTERM. Start it first: "
        "everything else finds each other through its address, which it prints and writes to "
        "<run.dir>/<run.name>/address. Started again after it died, it goes on from its journal "
        "(queue.store).",
        "asyncrl queue configs/recipes/demo.yaml queue.address=tcp://127.0.0.1:5555",
        (
            option(
                "--announce",
                type=int,
                metavar="FD",
                help="write the address to this file descriptor once it is bound",
            ),
            option(
                "--anew", action="store_true", help="forget what a queue of this run has left in its journal"
            ),
        ),
    ),
    "queue status": Command(
        _queue_status,
        "how a queue stands",
        "Tasks and groups in each state, ages, leases by generator, what was dropped and refused and why, bytes, "
        "and how far generators work ahead, of a run that is going on.",
        "asyncrl queue status demo",
        (
            *TARGET,
            option("--json", action="store_true", help="the queue's whole reply, as JSON"),
        ),
        takes_config=False,
    ),
    "queue inspect": Command(
        _queue_inspect,
        "one task of a queue",
        "Show where a task stands, and what was made of it: prompt, texts (token ids if the run's tokenizer is not "
        "at hand), rewards, versions. Nothing changes by it.",
        "asyncrl queue inspect demo 117",
        (
            *STREAM,
            option("ordinal", type=int, metavar="ORDINAL", help="of the task in the stream"),
            option(
                "--save",
                metavar="FILE",
                help="write its group there, for `asyncrl groups` and `asyncrl retrain`",
            ),
        ),
        takes_config=False,
    ),
    "queue drain": Command(
        _queue_drain,
        "end a run early",
        "Lease no more tasks, drop those that are pending, finish and train what is under way.",
        "asyncrl queue drain demo",
        STREAM,
        takes_config=False,
    ),
    "sync plan": Command(
        _sync_plan,
        "what a weight update will cost",
        "Plan one update of all generators from the shapes of a model alone, for pools of any size: who sends how "
        "much, through how many streams and hops, how long it takes over links of sync.network_gb_s and "
        "sync.local_gb_s, and the memory of each rank against its device's. Nothing is started.",
        "asyncrl sync plan configs/recipes/demo.yaml --model configs/models/deepseek_v3 model.dtype=bfloat16 "
        "--learner 'fsdp 512 ep 64' --generators '64 tp 8'",
        (
            option(
                "--model",
                metavar="PATH",
                help="folder with a config.json, in place of model.path; weights are not read",
            ),
            option(
                "--learner",
                metavar="WORDS",
                help="its ranks, e.g. 'replicate 2 fsdp 64 tp 4 ep 16' (experts dealt out to 16 of the fsdp ranks); "
                "unless given, as learner.processes and learner.parallel have it",
            ),
            option(
                "--generators",
                metavar="WORDS",
                help="how many, and the ranks of one, e.g. '64 tp 8 ep 8 host 8' (host: ranks on one machine); "
                "unless given, as generator.count and generator.vllm have it",
            ),
            option(
                "--device-gb",
                metavar="GB",
                type=float,
                help="memory of one device, in 10^9 bytes; unless given, of the accelerator here",
            ),
        ),
    ),
    "keys": Command(
        _keys,
        "make the keys of a queue",
        "Make a key pair for the queue and one for everybody else, for runs over several machines: without "
        "queue.keys a queue listens on loopback only.",
        "asyncrl keys ~/.asyncrl/keys",
        (option("folder", metavar="DIR", help="is made if it is not there"),),
        takes_config=False,
    ),
}
