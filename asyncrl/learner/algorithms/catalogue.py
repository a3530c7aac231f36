"""The registries as text: what `asyncrl algorithms` prints, and the pages of `docs/algorithms/`.

literal ── registry ──▸ function ── docstring ──▸ definition · details
               │            └────── source ─────▸ the config keys that it reads
               └──▸ paper, needs
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from asyncrl.config.commented_yaml import key_comments
from asyncrl.config.schema import Config
from asyncrl.learner.algorithms import registry
from asyncrl.learner.algorithms.registry import Algorithm

KINDS: Final[dict[str, Mapping[str, Algorithm[Any]]]] = {
    "advantage": registry.ADVANTAGES,
    "loss": registry.LOSSES,
    "correction.kind": registry.CORRECTIONS,
    "correction.reject": registry.REJECTIONS,
}
"""Key below `algorithm.` → its literals."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One algorithm. definition: the first line of the docstring · details: the rest · keys: dotted, all it reads."""

    name: str
    definition: str
    details: str
    source: str
    needs: tuple[str, ...]
    keys: tuple[str, ...]


def algorithm_rows(kind: str) -> list[CatalogueEntry]:
    """All literals of `algorithm.<kind>`, in the order of the files that define them."""
    return [_row(kind, name, entry) for name, entry in KINDS[kind].items()]


def as_text() -> str:
    """For a terminal: a line per literal, one block per key."""
    return "\n\n".join(f"algorithm.{kind}\n" + "\n".join(_lines(kind)) for kind in KINDS)


def as_markdown() -> str:
    """The reference part of the pages in docs/algorithms/."""
    blocks = ["\n".join(_markdown(kind)) for kind in KINDS]
    return "\n".join([*blocks, *_other_keys()])


def _lines(kind: str) -> Iterator[str]:
    every = algorithm_rows(kind)
    width = max(len(row.name) for row in every) + 2
    for row in every:
        needs = f"  needs: {', '.join(row.needs)}" if row.needs else ""
        yield f"  {row.name:<{width}}{row.definition}"
        yield f"  {'':<{width}}{row.source or 'plain'}{needs}"


def _markdown(kind: str) -> Iterator[str]:
    yield f"## `algorithm.{kind}`\n"
    for row in algorithm_rows(kind):
        yield f"### `{row.name}`\n"
        yield f"{row.definition}\n"
        if row.details:
            yield f"{row.details}\n"
        if row.source:
            yield f"- source: {row.source}"
        if row.needs:
            yield f"- needs: {', '.join(row.needs)}"
        for key in row.keys:
            yield f"- `{key}`: {key_comments()[key]}"
        yield ""


def _other_keys() -> Iterator[str]:
    """Keys of `algorithm:` that no single function is noted for: aggregation, shaping, KL, filters."""
    shown = {key for kind in KINDS for row in algorithm_rows(kind) for key in row.keys}
    shown |= {f"algorithm.{kind}" for kind in KINDS}
    yield "## Every other key of `algorithm`\n"
    for key, comment in key_comments().items():
        if key.startswith("algorithm.") and key not in shown:
            literals = _literals(key)
            yield f"- `{key}`{literals}: {comment}"


def _literals(key: str) -> str:
    """` (one of …)` for a key that takes some words only."""
    hint: Any = Config
    for name in key.split("."):
        hint = get_type_hints(hint)[name]
    return f" (one of {', '.join(get_args(hint))})" if get_origin(hint) is Literal else ""


def _row(kind: str, name: str, entry: Algorithm[Any]) -> CatalogueEntry:
    definition, _, details = inspect.cleandoc(entry.function.__doc__ or "").partition("\n\n")
    section = "algorithm.correction." if kind.startswith("correction.") else "algorithm."
    keys = tuple(section + key for key in _keys_read(entry.function) if section + key in key_comments())
    return CatalogueEntry(
        name, " ".join(definition.split()), details, entry.source, tuple(sorted(entry.needs)), keys
    )


@functools.cache
def _keys_read(function: Callable[..., Any]) -> tuple[str, ...]:
    """Attributes of `config` in this function and in those of the package that it hands `config` to."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "config":
            found[node.attr] = None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _passes_config(node):
            called = getattr(sys.modules[function.__module__], node.func.id, None)
            if inspect.isfunction(called) and called is not function:
                found |= dict.fromkeys(_keys_read(called))
    return tuple(found)


def _passes_config(call: ast.Call) -> bool:
    return any(isinstance(argument, ast.Name) and argument.id == "config" for argument in call.args)
