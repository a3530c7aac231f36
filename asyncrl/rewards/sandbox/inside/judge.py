"""The judge: runs the tests of a program, in a process that never runs the program.

    tests ── f(2) ──▸ Proxy ── arguments ──▸ the program's process
                           ◂── data ───────        assert f(2) == 4 is evaluated here

A name that the tests use and do not define stands for the program's object of that name. Its calls, attributes,
items, iteration, len, str and bool are evaluated in the program's process; plain data comes back by value. So the
program sees the arguments of its calls, and nothing else: neither the text of the tests, nor what they expect, nor
their results. Comparisons and arithmetic are never handed to it, because an object of the program could then claim to
equal everything: an object that is no plain data equals itself alone.

Python's own names come first: a program that defines `abs` or `all` changes no test. Modules are imported here.
"""

from __future__ import annotations

import builtins
import importlib
import signal
import sys
import threading
import time
import types
import weakref
from typing import Any

from . import data, frames
from .names import TestsRefused, names_of
from .template import Template

NEVER_RAISED = (StopIteration, StopAsyncIteration)
"""Raised by a call, they would end a loop of the tests early, and with it the comparisons."""


MADE_OF_REPLIES = (types.GetSetDescriptorType, types.MemberDescriptorType, types.MappingProxyType)
"""Attributes of types, which a program may return in place of its objects."""


class ProgramLost(BaseException):
    """The program ended, took too long, or sent what is no reply: this test has failed."""


class Proxy:
    """An object of the program. Operators are not forwarded, see above."""

    def __init__(self, link: ProgramLink, reference: list[Any], epoch: int) -> None:
        object.__setattr__(self, "_judged", (link, reference, epoch))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._do("call", list(arguments), keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._do("attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("set_attribute", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        self._do("delete_item", key)

    def __iter__(self) -> Any:
        return self._do("iterate")

    def __next__(self) -> Any:
        return self._do("next")

    def __len__(self) -> int:
        return self._do("length")

    def __bool__(self) -> bool:
        return self._do("truth")

    def __str__(self) -> str:
        return self._do("text")

    def __repr__(self) -> str:
        return self._do("representation")

    def _do(self, operation: str, *operands: Any) -> Any:
        link, _, _ = object.__getattribute__(self, "_judged")
        return link.request(operation, self, *operands)


class ProgramLink:
    """Requests to the program. One thread at a time; a callback may make requests of its own."""

    def __init__(self, template: Template) -> None:
        self._template, self._turn = template, threading.RLock()
        self._known: weakref.WeakValueDictionary[tuple[int, int], Proxy] = weakref.WeakValueDictionary()
        self._callbacks: list[Any] = []
        self._exceptions: dict[str, type[Exception]] = {}
        self.deadline, self.lost, self.used = 0.0, False, False
        self.refusal: str | None = None

    def named(self, name: str) -> Any:
        """The object that stands for a name of the program. Raises KeyError if it has none."""
        reply = self._exchange(["name", name])
        if reply[0] == "named":
            return Proxy(self, ["n", name], 0)
        if reply[0] == "exception":
            return self._exceptions.setdefault(name, type(name, (self._class(reply[1]),), {}))
        if reply[0] == "value":
            self.used = True
            return self._decoded(reply[1])
        raise KeyError(name)

    def request(self, operation: str, *operands: Any) -> Any:
        """The result of an operation. Raises what the program raised, and ProgramLost."""
        with self._turn:
            self.used = True
            return self._result(operands, self._exchange([operation, *map(self._encoded, operands)]))

    def _exchange(self, request: list[Any]) -> list[Any]:
        if self.lost:
            raise ProgramLost
        try:
            reply = self._template.exchange(frames.packed(request), self.deadline)
            while isinstance(reply, list) and reply[:1] == ["callback"]:
                reply = self._template.exchange(frames.packed(self._called(*reply[1:])), self.deadline)
            if not isinstance(reply, list) or not reply:
                raise frames.FrameError("no reply")
        except (frames.FrameError, TypeError) as error:
            raise self._failed(error) from None
        return reply

    def _result(self, operands: tuple[Any, ...], reply: list[Any]) -> Any:
        try:
            kind, *parts = reply
            if kind == "value":
                wire, changes = parts
                for place, now in changes:
                    _change(operands[1:][place], self._decoded(now))
                return self._decoded(wire)
            if kind == "raise":
                names, text = parts
                error: BaseException = self._made(names, str(text))
            else:
                error = StopIteration() if reply == ["end"] else self._failed(None)
        except (data.DataError, TypeError, ValueError, LookupError) as wrong:
            raise self._failed(wrong) from None
        raise error

    def _failed(self, error: Exception | None) -> ProgramLost:
        self.lost = True
        return ProgramLost(str(error))

    def _called(self, number: Any, arguments: Any, keywords: Any) -> list[Any]:
        """The reply to a callback: a function of the tests runs."""
        try:
            function = self._callbacks[number]
            result = function(*self._decoded(arguments), **self._decoded(keywords))
            return ["returned", self._encoded(result)]
        except Exception as error:
            return ["failed", f"{type(error).__name__}: {error}"]

    def _encoded(self, value: Any) -> Any:
        return data.encode(value, self._reference)

    def _decoded(self, wire: Any) -> Any:
        return data.decode(wire, self._resolved)

    def _reference(self, value: Any) -> list[Any]:
        if isinstance(value, Proxy):
            _, reference, epoch = object.__getattribute__(value, "_judged")
            if reference[0] == "o" and epoch != self._template.epoch:
                raise self._failed(None)  # an object of a process that is gone
            return list(reference)
        if isinstance(value, (*MADE_OF_REPLIES, *self._exceptions.values())):
            raise self._failed(None)  # the tests pass it, but the program is why it is none of plain data
        if (found := importable(value)) is not None:
            # It runs at the program's: called from there, `eval` would run in this process.
            return ["m", found]
        if callable(value) and not isinstance(value, type):
            self._callbacks.append(value)
            return ["k", len(self._callbacks) - 1]
        self.refusal = (
            f"they pass {type(value).__name__!r} to the program: plain data, functions and the program's own objects "
            "can be passed"
        )
        raise TestsRefused(self.refusal)

    def _resolved(self, tag: str, part: Any) -> Any:
        if tag == "k":
            return self._callbacks[part]
        if tag != "o" or type(part) is not int:
            raise data.DataError(tag)
        key = (self._template.epoch, part)
        proxy = self._known.get(key) or Proxy(self, ["o", part], key[0])
        self._known[key] = proxy
        return proxy

    def _made(self, names: list[str], text: str) -> Exception:
        """An exception of the first of these classes that is known here."""
        for name in names:
            kind = self._exceptions.get(name) or getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NEVER_RAISED):
                try:
                    return kind(text)
                except TypeError:
                    continue  # it wants other arguments
        return RuntimeError(text)

    def _class(self, names: list[str]) -> type[Exception]:
        return type(self._made([name for name in names if name not in self._exceptions], ""))


class Judge:
    """The tests of one program, which share a namespace.

    wall_s: time for each of them, and for each start of the program; total_s: for all together.
    """

    def __init__(self, template: Template, wall_s: float, total_s: float) -> None:
        self._template, self._wall_s = template, wall_s
        self._end = time.monotonic() + total_s
        self._link, self._in_test = ProgramLink(template), False
        sys.modules["__main__"] = types.ModuleType("__main__")
        self._world = vars(sys.modules["__main__"])

    def judged(self, texts: list[str], entry: list[str]) -> dict[str, Any]:
        """{"code", "ended", "passed"}, or {"refused": why} for tests that cannot be judged."""
        try:
            names = names_of(texts, entry)
            for name, module in names.modules.items():
                self._world[name] = importlib.import_module(module)
            if not self._started():
                ended = "time" if self._template.status is None else "exit"
                return {"ended": ended, "code": self._template.kill(), "passed": None}
            for name in names.program:
                self._bind(name)
            passed = [self._passes(text) for text in texts]
        except TestsRefused as error:
            return {"refused": str(error)}
        except ImportError as error:
            return {"refused": f"they use a module that is not installed: {error}"}
        if self._link.refusal is not None:
            return {"refused": self._link.refusal}
        if names.program and not self._link.used and not self._link.lost and all(passed):
            return {"refused": "they do not call the program: any program passes them"}
        self._template.kill()
        return {"ended": "exit", "code": 0, "passed": passed}

    def _started(self) -> bool:
        self._link.lost = False
        self._link.deadline = self._next_deadline()
        self._link.lost = not self._template.start(self._link.deadline)
        return not self._link.lost

    def _next_deadline(self) -> float:
        return min(time.monotonic() + self._wall_s, self._end)

    def _bind(self, name: str) -> None:
        try:
            self._world[name] = self._link.named(name)
        except (KeyError, data.DataError, TypeError, IndexError, ProgramLost):
            self._world.pop(name, None)  # a NameError for those tests that use it

    def _passes(self, text: str) -> bool:
        """Whether a test runs to its end. A test that catches ProgramLost has failed all the same."""
        if self._link.lost:
            self._template.kill()
            if not self._started():
                return False
        self._link.deadline = self._next_deadline()
        seconds = self._link.deadline - time.monotonic()
        if seconds <= 0:
            return False
        signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return self._ends_well(text)
        except ProgramLost:
            return False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _ends_well(self, text: str) -> bool:
        self._in_test = True
        try:
            return execute_test(text, self._world) and not self._link.lost
        finally:
            self._in_test = False

    def _late(self, *_: Any) -> None:
        """The alarm has the deadline of the program's replies: it may come when the test has failed by that already."""
        if self._in_test:
            self._link.lost = True
            raise ProgramLost("the test took too long")


def execute_test(text: str, world: dict[str, Any]) -> bool:
    """Run a test. Raises ProgramLost and TestsRefused."""
    try:
        exec(compile(text, "tests.py", "exec", dont_inherit=True), world)
    except (ProgramLost, TestsRefused):
        raise
    except SystemExit as end:  # unittest.main() ends so; the program cannot raise it
        return not end.code
    except BaseException:
        return False
    return True


def importable(value: Any) -> list[str] | None:
    """Module and name of a function or class that is not of the tests."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(str(module)), name, None) is not value:
        return None
    return [str(module), name]


def _change(arguments: Any, now: Any) -> None:
    """Give lists, dicts and sets among the arguments the contents that the call left in them."""
    places = range(len(arguments)) if isinstance(arguments, list) else list(arguments)
    for place in places:
        old, new = arguments[place], now[place]
        if isinstance(old, list) and type(new) is list:
            old[:] = new
        elif (isinstance(old, dict) and type(new) is dict) or (isinstance(old, set) and type(new) is set):
            old.clear()
            old.update(new)
