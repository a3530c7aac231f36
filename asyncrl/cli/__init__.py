"""The command line: words become a command, its errors become messages and exit codes.

Every command imports what it needs when it runs, so that `asyncrl --help` stays fast.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import logging
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from asyncrl.cli import (
    explain,
    imports,
    launch,
    models,
    observe,
    offline,
    plan,
    queue,
    recorded,
    run,
    workers,
)
from asyncrl.cli.command import Arguments, Command, option
from asyncrl.errors import INTERRUPTED, AsyncRLError, ConfigError, RunClosedError
from asyncrl.launch.views.output import drop_output, lasting_output, without_control
from asyncrl.system.rank_process import begin_signs_of_life, end_by, end_rank, meeting, rank_and_world

ABOUT = """\
Train language models with reinforcement learning while generation never stops.

A first try, about 5 minutes on two CPU cores:

  asyncrl demo

On one machine, one command runs everything:

  asyncrl train configs/recipes/demo.yaml

On several machines each process is started by hand, with the same configuration and the broker's address:

  asyncrl keys KEYS     # once, on the queue's machine; the others get a folder KEYS with client.key alone
  asyncrl queue CONFIG queue.keys=KEYS queue.address=tcp://10.0.0.1:5555
  asyncrl learner CONFIG queue.keys=KEYS queue.address=tcp://10.0.0.1:5555 learner.processes=8
  asyncrl generator CONFIG queue.keys=KEYS queue.address=tcp://10.0.0.1:5555 --name generator-0
  asyncrl pool CONFIG MODEL queue.keys=KEYS queue.address=tcp://10.0.0.1:5555   # for what `placement` has on a pool

10.0.0.1 is the queue's machine. The learner offers its weights at the address of its route there, or at sync.host.
"""

EXIT_CODES = """\
exit codes:
  0    done, or the run was closed; a queue, generator or pool that SIGTERM or SIGHUP has stopped
  1    a bug: please report the traceback
  2    bad input: the command line, the configuration, the tasks
  4    a wait ran out; the message names who waited for whom
  5    a process of the run died; the message has the end of its log. One that ended with another of these
       codes ends `asyncrl train` with the same
  6    weights did not arrive whole, or arrived wrong
  7    a loss or gradient that must not be trained on
  8    the queue refused this process, e.g. one of another run
  9    the disk is full, or a folder cannot be written
  10   stopped by SIGTERM or SIGHUP (its terminal was closed) and saved: run.resume=true goes on
  11   a pool that trains a model is gone: start the learner again, from its newest checkpoint
  12   a rank of several, or its machine, is lost: start the process again, the learner from its newest checkpoint
  13   a run that was made again, or another one, differs from the recorded one; the message has the first difference
  130  interrupted with Ctrl-C: a generator or pool has returned its leases, a learner has written a checkpoint
"""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
DISK_EXIT_CODE = 9

OUTLIVE_READERS = ("demo", "train", "queue", "generator", "pool", "learner", *offline.COMMANDS)
"""Commands that go on when nobody reads their output any more."""

NO_READER_EXIT_CODE = 141
"""As a shell has it for a command that SIGPIPE has ended, e.g. one piped into head."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Expected errors are one message on stderr, no traceback."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from asyncrl.system.signals import die_with_parent

        die_with_parent()
    begin_signs_of_life()
    arguments = parse_words(sys.argv[1:] if words is None else words)
    if arguments.command in OUTLIVE_READERS:
        with lasting_output():
            return _end(_exit_code(arguments))
    try:
        code = _exit_code(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        drop_output(sys.stdout)
        return NO_READER_EXIT_CODE


def _end(code: int) -> int:
    """The exit code of this process, unless it must end otherwise: as one of several ranks, or as a rank of its own."""
    if code < 0:
        end_by(-code)
    if rank_and_world()[1] > 1 and meeting() != ("", ""):
        end_rank(code)
    return code


def _exit_code(arguments: Arguments) -> int:
    """Run the command; its expected errors become messages and exit codes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.captureWarnings(True)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except RunClosedError as closed:
        _print_last(f"asyncrl {arguments.command}: {closed or 'the run is over'}")
        return 0
    except AsyncRLError as error:
        each = error.each if isinstance(error, ConfigError) else (error,)
        _report(arguments, *(f"{type(one).__name__}: {one}" for one in each))
        return error.exit_code
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _report(arguments, f"cannot write: {error}")
        return DISK_EXIT_CODE
    except KeyboardInterrupt:
        _print_last(f"asyncrl {arguments.command}: interrupted")
        return INTERRUPTED


def _report(arguments: Arguments, *errors: str) -> None:
    """Print why the command ends, on stderr, and give it to torchrun: it prints it as the root cause below its own
    traceback, where a reader looks first."""
    message = "\n".join(f"asyncrl {arguments.command}: {without_control(error)}" for error in errors)
    _print_last(message)
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


def _print_last(message: str) -> None:
    """On stderr. The log of a process may lie on a disk that is full: then the exit code alone shows why it ends."""
    with suppress(OSError):
        print(message, file=sys.stderr)


def parse_words(words: Sequence[str]) -> Arguments:
    """key=value words may stand anywhere after CONFIG. Exits with 2 on words that mean nothing.

    The result has all words as `command_line`, too.
    """
    given = [*words]
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
    arguments.command_line = given
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
        sub.set_defaults(overrides=[])
        for names, settings in command.options:
            sub.add_argument(*names, **settings)
        if command.takes_config or command.takes_keys:
            sub.add_argument(
                "overrides",
                metavar="key=value",
                nargs="*",
                default=[],
                help="set a key, e.g. batch.groups=32",
            )
    return parser


def _completion(arguments: Arguments) -> int:
    from asyncrl.config.completion import script

    options = {
        name: [word for words, _ in command.options for word in words if word.startswith("--")]
        for name, command in COMMANDS.items()
    }
    takes_config = {name for name, command in COMMANDS.items() if command.takes_config}
    print(script(arguments.shell, options, takes_config), end="")
    return 0


COMMANDS: dict[str, Command] = {
    **run.COMMANDS,
    **queue.COMMANDS,
    **workers.COMMANDS,
    **plan.COMMANDS,
    **launch.COMMANDS,
    "config": explain.COMMANDS["config"],
    "completion": Command(
        _completion,
        "completion of commands and keys in your shell",
        "Print a script by which bash, zsh or fish complete commands, options, CONFIG files, key= names and the values "
        "that a key chooses from. bash and zsh: put the line below into ~/.bashrc or ~/.zshrc with your shell's name; "
        "fish: asyncrl completion fish > ~/.config/fish/completions/asyncrl.fish",
        'eval "$(asyncrl completion bash)"',
        (option("shell", choices=["bash", "zsh", "fish"]),),
        takes_config=False,
    ),
    "algorithms": explain.COMMANDS["algorithms"],
    "recipes": explain.COMMANDS["recipes"],
    **imports.COMMANDS,
    **offline.COMMANDS,
    **models.COMMANDS,
    **observe.COMMANDS,
    **recorded.COMMANDS,
}
