"""A command of the command line, and steps that several commands begin with."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


Arguments = argparse.Namespace
Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """An argument of a command, as `ArgumentParser.add_argument` takes it."""
    return names, settings


@dataclass(frozen=True, slots=True)
class Command:
    """`about`: one line for the list of commands · `text`: its own --help · `options`: after CONFIG · `operand`: a
    word after CONFIG · `takes_keys`: key=value words without CONFIG."""

    run: Callable[[Arguments], int]
    about: str
    text: str
    example: str
    options: Sequence[Option] = ()
    takes_config: bool = True
    config_optional: bool = False
    operand: str | None = None
    takes_keys: bool = False


def read_config(arguments: Arguments, optional: Sequence[str] = ()) -> Config:
    """optional: see `load_config`"""
    from asyncrl.config.load import load_config

    return load_config(arguments.config, arguments.overrides, optional=optional)


def split_run_config(arguments: Arguments) -> Config:
    """For a process that must find the broker. Raises ConfigError unless its address is a concrete one."""
    config = read_config(arguments)
    if "*" in config.queue.address:
        rule = f"`asyncrl {arguments.command}` must know where the broker listens"
        remedy = "give the address that `asyncrl queue` prints, e.g. queue.address=tcp://10.0.0.1:5555"
        raise ConfigError("queue.address", config.queue.address, rule, remedy)
    return config


def loading(arguments: Arguments, what: str) -> None:
    """The first sign of life of a command: what it imports and loads next takes seconds. On stderr, so that stdout
    keeps what programs read; not from a process that `asyncrl train` has started, nor from every rank."""
    if "ASYNCRL_LAUNCHED" not in os.environ and os.environ.get("RANK", "0") == "0":
        print(f"asyncrl {arguments.command}: loading {what} …", file=sys.stderr, flush=True)
