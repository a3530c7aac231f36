"""YAML as configurations are written in it: what is a number, what `${…}` means, and no key twice.

`${section.key}` stands for the value of that key and `${oc.env:NAME}` for an environment variable, as OmegaConf has
them. Any other `${` is text, as prompts and templates hold it; `\\${` is text whatever follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any

import yaml

FLOAT = re.compile(
    r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
"""YAML 1.2's: 2e-4 and 1e3 are numbers, which YAML 1.1 takes for texts."""

DOLLAR = re.compile(r"(\\*)\$\{")
TIMESTAMP, FLOATS = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float"

LONGEST = 1 << 20
"""Characters of a document."""

DEEPEST = 64
"""Levels of lists and mappings in each other."""

MOST = 100_000
"""Values of a document once its aliases are written out."""

_Events: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _problem(f"a {key_node.id} cannot be a key", key_node)
            if key_node.value in seen:
                raise _problem(f"the key {key_node.value!r} stands here twice", key_node)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, OverflowError, TypeError, AttributeError) as error:  # e.g. !!int abc
            raise _problem(f"this is no value ({type(error).__name__}: {error})", node) from None


def _problem(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in several if tag not in (TIMESTAMP, FLOATS)]
    for first, several in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(FLOATS, re.compile(f"^(?:{FLOAT.pattern})$"), list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would take for something else, e.g. 1e3."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def one_line(value: Any) -> str:
    """A value as one line of YAML, which `parse_yaml` reads back.

    >>> one_line({"name": "1e3", "lr": 0.0002, "day": "2026-01-01"})
    "{name: '1e3', lr: 0.0002, day: 2026-01-01}"
    """
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=1 << 20, allow_unicode=True, sort_keys=False
    )
    return text.strip()[1:-1]


def parse_yaml(text: str) -> Any:
    """The values of a document. Raises yaml.YAMLError.

    >>> parse_yaml("{lr: 2e-4, groups: 64, when: 2026-01-01}")
    {'lr': 0.0002, 'groups': 64, 'when': '2026-01-01'}
    """
    return parse_with_lines(text)[0]


def parse_with_lines(text: str) -> tuple[Any, yaml.Node | None]:
    """The values of a document, and its nodes, which have line numbers. Raises yaml.YAMLError, also for a document that
    would take too long to read (`check_document`)."""
    check_document(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    finally:
        loader.dispose()


def with_references(value: Any, sections: frozenset[str]) -> Any:
    """`value` as OmegaConf is to have it, in which `${` is a reference only before one of `sections` or a resolver of
    OmegaConf's own.

    >>> with_references("${run.dir} costs ${x}", frozenset({"run"}))
    '${run.dir} costs \\\\${x}'
    """
    reference = re.compile(rf"\s*(?:{'|'.join(map(re.escape, sorted(sections)))})\.|\s*oc\.")

    def escape(found: re.Match[str]) -> str:
        already, refers = len(found[1]) % 2, reference.match(found.string, found.end())
        return found[0] if already or refers else _escaped(found)

    return _in_texts(value, lambda text: DOLLAR.sub(escape, text))


def escaped_references(value: Any) -> Any:
    """`value` as OmegaConf is to have it, in which no `${` is a reference.

    >>> escaped_references({"prompt": ["${run.dir}"]})
    {'prompt': ['\\\\${run.dir}']}
    """
    return _in_texts(value, lambda text: DOLLAR.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    return f"{found[1] * 2}\\${{"


def _in_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _in_texts(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_texts(one, change) for one in value]
    return value


def check_document(text: str) -> None:
    """Look through a document before it is read: a few lines can nest without end, or stand for billions. Its events
    come one by one, so this needs no recursion and little memory, whatever the document holds.

    Raises yaml.YAMLError for a document that is too long, too deep, or too large with its aliases written out, and for
    a value that holds itself.
    """
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
