"""A function that was typed into a notebook, as the text of a module that other processes import.

    cell ──▸ def reward ──▸ the names that it reads ─┬▸ modules, and what a module defines: an import
                                                     ├▸ functions and classes of cells: their source, and so on
                                                     └▸ other values: a literal, or bytes for pickle

The same cells give the same text in another session, so that a run can be resumed from a notebook. The bytes are read
by processes of the run, from a file that its owner alone may write.
"""

from __future__ import annotations

import ast
import base64
import builtins
import inspect
import io
import linecache
import pickle  # noqa: TID251  # the user's own values, in the user's own file
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

LITERAL_CHARACTERS = 200
"""Longer values are written as bytes."""

LAMBDA = "<lambda>"

HEADER = '"""Written by asyncrl.train from the cells that define {name}."""\n'


class CellError(Exception):
    """A function whose source cannot be had, or that needs a value that cannot be written down."""


def module_text(function: Callable[..., Any]) -> str:
    """A module that defines `function` and what it reads. Raises CellError."""
    return _Module(function).text()


class _Module:
    """The parts of the text, each after those that it needs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._globals: Mapping[str, Any] = getattr(function, "__globals__", {}) or vars(
            sys.modules[function.__module__]
        )
        self._parts: dict[str, str] = {}
        self._folders: list[str] = []

    def text(self) -> str:
        name = self._function.__name__
        self._add(name, self._function)
        folders = "".join(f"sys.path.append({folder!r})\n" for folder in dict.fromkeys(self._folders))
        paths = f"import sys\n{folders}" if folders else ""
        return "\n".join([HEADER.format(name=name) + paths, *self._parts.values()])

    def _add(self, name: str, value: Any) -> None:
        """Statements that bind `name` to `value`, after those that it needs. A function may need itself."""
        if name in self._parts:
            return
        if statement := self._import(name, value):
            self._parts[name] = statement
        elif isinstance(value, FunctionType | type) or callable(getattr(value, "__wrapped__", None)):
            self._define(name, value)
        else:
            self._parts[name] = _value(name, value)

    def _define(self, name: str, value: Any) -> None:
        own = _own_name(name, value)
        if own != name:
            self._add(own, value)
            self._parts[name] = f"{name} = {own}\n"
            return
        self._parts[name] = ""  # being written: what it needs may need it
        source = _source(name, value)
        for other in _reads(source):
            if other in self._globals and not hasattr(builtins, other):
                self._add(other, self._globals[other])
        del self._parts[name]
        self._parts[name] = source

    def _import(self, name: str, value: Any) -> str:
        """Empty for what no module of a file defines."""
        if isinstance(value, ModuleType):
            self._note_folder(value)
            return f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "") + "\n"
        module, own = (
            sys.modules.get(str(getattr(value, "__module__", None))),
            getattr(value, "__qualname__", ""),
        )
        if module is None or stands_in_cells(module) or getattr(module, own, None) is not value:
            return ""
        self._note_folder(module)
        return f"from {module.__name__} import {own}" + (f" as {name}" if name != own else "") + "\n"

    def _note_folder(self, module: ModuleType) -> None:
        """The user's own modules are found as they were here; others are installed."""
        top = sys.modules.get(module.__name__.partition(".")[0])
        file = getattr(top, "__file__", None)
        if file is None:
            return
        folder = Path(file).resolve().parent
        folder = folder.parent if hasattr(top, "__path__") else folder
        installed = (Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
        if not any(folder.is_relative_to(place) for place in installed):
            self._folders.append(str(folder))


def stands_in_cells(module: ModuleType) -> bool:
    """Whether other processes cannot import this module: there is no file that it was made from."""
    file = getattr(module, "__file__", None)
    return module.__spec__ is None if file is None else not Path(file).is_file()


def _own_name(name: str, value: Any) -> str:
    """The name that its source binds. `name`: by which it was found."""
    if value.__name__ != LAMBDA:
        return str(value.__name__)
    bound = re.match(r"(\w+)\s*=\s*lambda\b", _source(name, value))
    if bound is None:
        raise CellError(f"{name} is a lambda that stands in other code")
    return bound[1]


def _source(name: str, value: Any) -> str:
    """The definition of a function or class as it stands in its cell, also of a class before Python 3.13."""
    if isinstance(value, type):
        found = _class_source(value)
    else:
        plain = inspect.unwrap(value)
        if plain.__closure__:
            free = ", ".join(plain.__code__.co_freevars)
            raise CellError(f"{name} reads {free} of the function around it")
        try:
            found = textwrap.dedent(inspect.getsource(plain))
        except (OSError, TypeError):
            found = ""
    if not found:
        raise CellError(f"the source of {name} is not known")
    return found


def _class_source(value: type) -> str:
    """The newest definition of that name in the cells that Python keeps for its tracebacks."""
    for lines in reversed([*_cells()]):
        text = "".join(lines)
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]) + "\n"
    return ""


def _cells() -> Iterator[list[str]]:
    """Source that was never a file has no time of change."""
    for entry in list(linecache.cache.values()):
        if len(entry) == 4 and entry[1] is None:
            yield entry[2]


def _reads(source: str) -> list[str]:
    """The global names that a definition reads, those of its decorators, defaults and annotations too.

    >>> _reads("def f(a: B = C):\\n    a = d(a)\\n    return lambda: e + a")
    ['B', 'C', 'd', 'e']
    """
    found: set[str] = set()
    tables = [symtable.symtable(source, "<cell>", "exec")]
    while tables:
        table = tables.pop()
        of_module = table.get_type() == "module"
        found |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (symbol.is_global() or (of_module and not symbol.is_assigned()))
        }
        tables += table.get_children()
    return sorted(found)


def _value(name: str, value: Any) -> str:
    text = _sorted_repr(value)
    try:
        if len(text) <= LITERAL_CHARACTERS and ast.literal_eval(text) == value:
            return f"{name} = {text}\n"
    except (ValueError, SyntaxError):
        pass
    try:
        kept = pickle.dumps(value, protocol=4)
        _Reader(io.BytesIO(kept)).load()
    except Exception as error:
        rule = f"{name}, a {type(value).__name__}, cannot be written into a file ({error})"
        raise CellError(rule) from None
    return f"import base64, pickle\n{name} = pickle.loads(base64.b64decode({base64.b64encode(kept)!r}))\n"


def _sorted_repr(value: Any) -> str:
    """As repr; the order of a set is another one in each session."""
    return f"{{{', '.join(sorted(map(repr, value)))}}}" if type(value) is set and value else repr(value)


class _Reader(pickle.Unpickler):
    """Refuses what other processes could not find."""

    def find_class(self, module: str, name: str) -> Any:
        if module in sys.modules and stands_in_cells(sys.modules[module]):
            raise CellError(f"its class {name} stands in a cell")
        return super().find_class(module, name)
