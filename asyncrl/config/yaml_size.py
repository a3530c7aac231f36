"""A YAML document is looked through before it is read: a few lines can nest without end, or stand for billions.

The events of a document come one by one, so this needs no recursion and little memory, whatever the document holds.
"""

from __future__ import annotations

from typing import Any

import yaml

LONGEST = 1 << 20
"""Characters of a document."""

DEEPEST = 64
"""Levels of lists and mappings in each other."""

MOST = 100_000
"""Values of a document once its aliases are written out."""

_Events: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_size(text: str) -> None:
    """Raises yaml.YAMLError for a document that is too long, too deep, or too large with its aliases written out, and
    for a value that holds itself."""
    if len(text) > LONGEST:
        raise yaml.MarkedYAMLError(problem=f"it has {len(text)} characters, of at most {LONGEST}")
    sizes: dict[str, int] = {}  # of what has an anchor, once it is closed
    opened: list[_Opened] = [_Opened(None)]
    for event in yaml.parse(text, Loader=_Events):
        if isinstance(event, yaml.CollectionEndEvent):
            done = opened.pop()
            _add(opened[-1], done.size, done.anchor, sizes, event)
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(opened) > DEEPEST:
                raise _refused(f"nests deeper than {DEEPEST} levels", event)
            opened.append(_Opened(event.anchor))
        elif isinstance(event, yaml.AliasEvent):
            if any(outer.anchor == event.anchor for outer in opened):
                raise _refused(f"*{event.anchor} stands inside of what it stands for", event)
            _add(opened[-1], sizes.get(event.anchor, 1), None, sizes, event)
        elif isinstance(event, yaml.ScalarEvent):
            _add(opened[-1], 1, event.anchor, sizes, event)


class _Opened:
    """A list or mapping that is not closed yet."""

    def __init__(self, anchor: str | None) -> None:
        self.anchor, self.size = anchor, 1


def _add(outer: _Opened, size: int, anchor: str | None, sizes: dict[str, int], event: yaml.Event) -> None:
    if anchor is not None:
        sizes[anchor] = size
    outer.size += size
    if outer.size > MOST:
        raise _refused(f"stands for more than {MOST} values", event)


def _refused(problem: str, event: yaml.Event) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
