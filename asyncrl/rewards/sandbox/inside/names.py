"""Which names in the texts of tests are the program's: decided by the texts alone, before the program runs.

defined, imported, a parameter                  the tests' own
only ever followed by a dot, and a module       imported by the judge
in the task's entry point                       the program's
Python's own (`len`, `abs`)                     Python's
any other                                       the program's; refused where the task names an entry point
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import symtable
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIASES = {"np": "numpy", "pd": "pandas"}


class TestsRefused(BaseException):
    """The tests cannot be judged, whatever the program. `except Exception` in the tests does not catch it."""

    __test__ = False


class TestNames(NamedTuple):
    """program: names of the program; modules: the judge imports them, name → module."""

    program: tuple[str, ...]
    modules: dict[str, str]


def names_of(texts: Sequence[str], entry: Sequence[str]) -> TestNames:
    """Raises TestsRefused, with a remedy, if they are no Python or the program's names cannot be determined.

    >>> names_of(["import math", "assert math.isclose(area(2), abs(len(x)))"], [])
    TestNames(program=('area', 'x'), modules={})
    >>> names_of(["assert sum(10, 15) == 6"], [])
    TestNames(program=('sum',), modules={})
    """
    free = _free(texts)
    _check_imports(texts)
    called, others = _uses(texts)
    modules = {
        name: ALIASES.get(name, name)
        for name in free - called - others
        if name in ALIASES or name in sys.stdlib_module_names
    }
    free -= modules.keys()
    unknown = {name for name in free if not hasattr(builtins, name)}
    if entry:
        if strangers := sorted(unknown - set(entry)):
            raise TestsRefused(
                f"they use {', '.join(strangers)}, which is not the entry point {', '.join(entry)}: define or import "
                "it in the tests, so that a program cannot replace it"
            )
        unknown = set(entry)
    shadowed = free & called
    if not unknown and len(shadowed) == 1:
        unknown = shadowed
    if not unknown:
        raise TestsRefused(
            "they use no name of the program: call its function, and if that has the name of one of Python's own, "
            "name it in the field of the entry point"
        )
    return TestNames(tuple(sorted(unknown)), modules)


def _check_imports(texts: Sequence[str]) -> None:
    """Raises TestsRefused for an import at the top of a text that no program can make succeed."""
    for text in texts:
        for node in ast.parse(text).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                root = module.partition(".")[0]
                if root != "__future__" and (not root or importlib.util.find_spec(root) is None):
                    raise TestsRefused(
                        f"they import {module or '.'}, which is not installed; names of the program need no import"
                    )


def _free(texts: Sequence[str]) -> set[str]:
    """TestNames that are used and neither defined nor imported."""
    used: set[str] = set()
    bound: set[str] = set()
    for number, text in enumerate(texts, 1):
        try:
            top = symtable.symtable(text, "tests.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise TestsRefused(f"test {number} is no Python: {error}") from None
        for table in _tables(top):
            for symbol in table.get_symbols():
                at_top = table is top or symbol.is_declared_global()
                if at_top and (symbol.is_assigned() or symbol.is_imported()):
                    bound.add(symbol.get_name())
                if symbol.is_referenced() and (table is top or symbol.is_global()):
                    used.add(symbol.get_name())
    return used - bound - {"__name__", "__file__"}


def _tables(top: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield top
    for child in top.get_children():
        yield from _tables(child)


def _uses(texts: Sequence[str]) -> tuple[set[str], set[str]]:
    """(names that are called, names that are used otherwise than before a dot)."""
    called: set[str] = set()
    names: dict[int, str] = {}
    dotted: set[int] = set()
    kept = [ast.parse(text) for text in texts]  # keeps the nodes, whose ids are used
    for tree in kept:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                dotted.add(id(node.value))
            if isinstance(node, ast.Name):
                names[id(node)] = node.id
    return called, {name for number, name in names.items() if number not in dotted}
