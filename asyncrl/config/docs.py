"""The comments of the schema as documentation: `asyncrl config --print` explains each key that it shows."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import tokenize
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from asyncrl.config import schema
from asyncrl.config.schema import Config
from asyncrl.config.sections import agent, algorithm, lora, parallel, placement, reward, tasks, telemetry
from asyncrl.config.yaml_values import escaped_references, one_line
from asyncrl.masking import masked_value
from asyncrl.version import VERSION

COMMENT_COLUMN = 36

WRITTEN_BY = "# asyncrl "
VERSION_LINE = f"{WRITTEN_BY}{VERSION}"
"""The first line of a configuration that is written."""


@functools.cache
def key_comments() -> dict[str, str]:
    """{'batch.groups': 'B: groups that one version is trained on', …}, read from the source."""
    classes: dict[str, dict[str, str]] = {}
    for module in (agent, algorithm, lora, parallel, placement, reward, schema, tasks, telemetry):
        classes |= _comments_of_classes(module)
    return {key: text for key, text in _walk(Config(), classes, "") if text}


def render(config: Config, *, show_passwords: bool = True) -> str:
    """Every key of `config` as YAML with its comment, and what follows from the keys that are null.

    `load_config` of this text gives an equal `Config`, if passwords in URLs are shown.
    """
    derived = (
        f"{VERSION_LINE}\n"
        f"# Resolved: W = {config.window} (queue.window), S = {config.spare_versions} spare versions, "
        f"queue.depth = {config.depth},\n# generator.fixed_shape = {str(config.fixed_shape).lower()}.\n"
    )
    return derived + "\n".join(_section_lines(config, "", 0, show_passwords)) + "\n"


def _comments_of_classes(module: ModuleType) -> dict[str, dict[str, str]]:
    """{'BatchConfig': {'groups': 'B: groups that …'}}"""
    source = inspect.getsource(module)
    comments = _comments_by_line(source)
    return {
        node.name: {
            statement.target.id: _comment_of(statement, comments)
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _section_lines(section: Any, prefix: str, indent: int, show_passwords: bool) -> Iterator[str]:
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield f"{' ' * indent}{field.name}:"
            yield from _section_lines(value, f"{key}.", indent + 2, show_passwords)
        else:
            shown = value if show_passwords else masked_value(value)
            setting = f"{' ' * indent}{field.name}: {scalar(shown)}"
            comment = key_comments().get(key)
            yield f"{setting:<{COMMENT_COLUMN}}  # {comment}" if comment else setting


def scalar(value: Any) -> str:
    """A value as one line of YAML."""
    return one_line(escaped_references(list(value) if isinstance(value, tuple) else value))


def _walk(section: Any, classes: dict[str, dict[str, str]], prefix: str) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, classes, f"{prefix}{field.name}.")
        else:
            found = (classes.get(made.__name__, {}).get(field.name) for made in type(section).__mro__)
            yield f"{prefix}{field.name}", next(filter(None, found), "")


def _comments_by_line(source: str) -> dict[int, tuple[bool, str]]:
    """Line number → (whether the line holds nothing else, text of the comment)."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: (not token.line[: token.start[1]].strip(), token.string.lstrip("# ").strip())
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.startswith("# fmt:")
    }


def _comment_of(statement: ast.AnnAssign, comments: dict[int, tuple[bool, str]]) -> str:
    """The comments on the statement's lines and on the comment-only lines right below it."""
    line = statement.end_lineno or statement.lineno
    words = [comments[at][1] for at in range(statement.lineno, line + 1) if at in comments]
    while words and comments.get(line + 1, (False, ""))[0]:
        line += 1
        words.append(comments[line][1])
    return " ".join(words)
