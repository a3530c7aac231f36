"""The process of a program: runs it, and then calls its functions for the judge.

It is the program's own process: whatever the program does to this file's functions, it can only change the values
that it returns. The judge trusts none of them.

    judge ── ["call", target, arguments, keywords] ──▸ program
          ◂── ["value", data, changed arguments] | ["raise", classes, text] | ["end"] | ["callback", n, …] ──
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

from . import confinement, data, frames
from .system import PR_SET_PDEATHSIG, prctl

World = dict[str, Any]

REQUESTS, REPLIES = 3, 4
"""Descriptors of the pipes from and to the judge."""


def enter(limits: dict[str, Any], cpu_s: int, first_closed: int) -> World:
    """Give up all rights in a forked process. Returns the namespace that a program has."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(os.environ["HOME"])
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.closerange(first_closed, 1 << 16)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in every program
    confinement.limit(limits, cpu_s)
    confinement.drop_capabilities()
    confinement.forbid_calls()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv, sys.modules["__main__"] = ["answer.py"], types.ModuleType("__main__")
    return vars(sys.modules["__main__"])


def execute(text: str, world: World) -> int:
    """Run a program. Returns the exit status that it would have as a process."""
    try:
        exec(compile(text, "answer.py", "exec", dont_inherit=True), world)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        return 1
    return 0


def run(text: str, limits: dict[str, Any]) -> int:
    """Run a program whose output is what counts. Returns its exit status."""
    world = enter(limits, limits["cpu_s"], first_closed=3)
    out = sys.stdout
    code = execute(text, world)
    with contextlib.suppress(OSError, ValueError):
        out.flush()
    return code


def serve_tests(text: str, limits: dict[str, Any], tests: int) -> int:
    """Run a program, then its functions as the judge requests. CPU time is that of all tests; the judge limits each."""
    world = enter(limits, limits["cpu_s"] * (tests + 1), first_closed=5)
    status = execute(text, world)
    frames.send(REPLIES, frames.packed(["ready", status]))
    served = Served(world)
    while status == 0:
        request = frames.received(REQUESTS)
        frames.send(REPLIES, served.reply(request))
    return status


class Served:
    """The objects of a program, numbered for the judge, and the operations that it may request."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._operations: dict[str, Callable[..., Any]] = {
            "call": lambda target, arguments, keywords: target(*arguments, **keywords),
            "attribute": getattr,
            "set_attribute": setattr,
            "item": lambda target, key: target[key],
            "set_item": lambda target, key, value: target.__setitem__(key, value),
            "delete_item": lambda target, key: target.__delitem__(key),
            "iterate": iter,
            "next": next,
            "length": len,
            "truth": bool,
            "text": str,
            "representation": repr,
        }

    def reply(self, request: Any) -> bytes:
        """A packed frame."""
        try:
            return frames.packed(self._replied(*request))
        except StopIteration:
            return frames.packed(["end"] if request[0] == "next" else ["raise", ["RuntimeError"], "no next"])
        except BaseException as error:
            return frames.packed(raised(error))

    def _replied(self, operation: str, *operands: Any) -> Any:
        if operation == "name":
            return self._named(operands[0])
        values = [self._decoded(operand) for operand in operands]
        result = self._operations[operation](*values)
        arguments = list(zip(map(self._encoded, values[1:]), operands[1:], strict=True))
        changed = [[place, now] for place, (now, before) in enumerate(arguments) if now != before]
        return ["value", self._encoded(result), changed if operation == "call" else []]

    def _named(self, name: str) -> Any:
        """The reply for a name of the program: its value, its classes if it is an exception, or that there is none."""
        if name not in self._world:
            return ["missing"]
        found = self._world[name]
        if isinstance(found, type) and issubclass(found, BaseException):
            return ["exception", classes(found)]
        wire = self._encoded(found)
        return ["named"] if isinstance(wire, list) and wire[0] == "o" else ["value", wire, []]

    def _encoded(self, value: Any) -> Any:
        return data.encode(value, self._reference)

    def _reference(self, value: Any) -> list[Any]:
        if isinstance(value, Callback):
            return ["k", value.number]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["o", self._numbers[id(value)]]

    def _decoded(self, wire: Any) -> Any:
        return data.decode(wire, self._resolved)

    def _resolved(self, tag: str, part: Any) -> Any:
        if tag == "n":
            return self._world[part]
        if tag == "m":
            return getattr(importlib.import_module(part[0]), part[1])
        return self._objects[part] if tag == "o" else Callback(self, part)

    def called_back(self, number: int, arguments: tuple[Any, ...], keywords: World) -> Any:
        """The result of a function of the tests. Raises RuntimeError if it raised."""
        request = ["callback", number, self._encoded(list(arguments)), self._encoded(keywords)]
        frames.send(REPLIES, frames.packed(request))
        answer = frames.received(REQUESTS)
        if answer[0] == "returned":
            return self._decoded(answer[1])
        raise RuntimeError(answer[1])


class Callback:
    """A function of the tests, which runs at the judge's."""

    def __init__(self, served: Served, number: int) -> None:
        self._served, self.number = served, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._served.called_back(self.number, arguments, keywords)


def raised(error: BaseException) -> list[Any]:
    try:
        text = str(error)[:1000]
    except BaseException:
        text = ""
    return ["raise", classes(type(error)), text]


def classes(kind: type) -> list[str]:
    """The names of a class and of its bases."""
    return [base.__name__ for base in type.mro(kind)]
