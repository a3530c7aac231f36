"""docs/keys.md: every key of a configuration, made from the schema by `python -m asyncrl.config.keys_page`."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from asyncrl.config.commented_yaml import key_comments, scalar
from asyncrl.config.load import sections
from asyncrl.config.remedies import in_words, kinds
from asyncrl.config.rules import Limit
from asyncrl.config.schema import Config

HEADER = """\
# Every key

`python -m asyncrl.config.keys_page` makes this page of the schema. [Configuration](configuration.md) explains files,
the command line and `${…}`; `asyncrl config CONFIG --print` shows these keys with the values of a run.
"""

TABLE = "| key | takes | default | meaning |\n|---|---|---|---|\n"


def markdown() -> str:
    """The page: a table for each section of a configuration file."""
    return "\n".join([HEADER, *(_section(name, made) for name, made in sections(Config).items())])


def _section(name: str, made: type) -> str:
    about = (
        "" if made.__doc__ is None or made.__doc__.startswith(f"{made.__name__}(") else inspect.getdoc(made)
    )
    intro = f"{about}\n\n" if about else ""
    return f"## `{name}`\n\n{intro}{TABLE}{''.join(_rows(made(), f'{name}.'))}"


def _rows(section: Any, prefix: str) -> Iterator[str]:
    """section: an object of defaults, of which the section around it may set some."""
    made: Any = type(section)
    hints = typing.get_type_hints(made, include_extras=True)
    for field in dataclasses.fields(section):
        key, default = f"{prefix}{field.name}", getattr(section, field.name)
        if field.name in sections(made):
            yield from _rows(default, f"{key}.")
            continue
        shown = "**required**" if default == "???" else f"`{scalar(default)}`"
        cells = (f"`{key}`", takes(hints[field.name]), shown, key_comments().get(key, ""))
        yield f"| {' | '.join(map(_escaped, cells))} |\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")


def takes(hint: Any) -> str:
    """The values of a type in words, with the bounds of a number.

    >>> takes(Annotated[int, Limit(above=0, most=2**31 - 1)] | None), takes(float), takes(Literal["a", "b"])
    ('a whole number > 0, or null', 'a number', '`a`, `b`')
    """
    return ", or ".join(_takes(kind) for kind in kinds(hint))


def _takes(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{word}`" for word in typing.get_args(kind))
    if typing.get_origin(kind) is not Annotated:
        return in_words(kind)
    limit = next(extra for extra in kind.__metadata__ if isinstance(extra, Limit))
    return f"{in_words(typing.get_args(kind)[0])}{_bounds(limit)}"


def _bounds(limit: Limit) -> str:
    """The lower bound, and the upper one of a share; others only keep numbers at a size that fits.

    >>> _bounds(Limit(least=0, most=1)), _bounds(Limit(above=0, most=1e30))
    (' ≥ 0 and ≤ 1', ' > 0')
    """
    low = f" > {limit.above:g}" if limit.least is None else f" ≥ {limit.least:g}"
    if limit.below is not None:
        return f"{low} and < {limit.below:g}"
    return f"{low} and ≤ {limit.most:g}" if limit.most is not None and limit.most <= 1 else low


if __name__ == "__main__":
    print(markdown(), end="")
