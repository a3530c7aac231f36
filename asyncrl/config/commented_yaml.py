"""A configuration as YAML that explains itself: `asyncrl config --print`, and config.yaml of a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast

from asyncrl.config import VERSION
from asyncrl.config.rules import sections_in
from asyncrl.config.schema import Config
from asyncrl.config.yaml_values import escaped_references, one_line
from asyncrl.masking import masked_value

COMMENT_COLUMN = 36

WRITTEN_BY = "# asyncrl "
VERSION_LINE = f"{WRITTEN_BY}{VERSION}"
"""The first line of a configuration that is written."""


@functools.cache
def key_comments() -> dict[str, str]:
    """{'batch.groups': 'B: groups that one version is trained on', …} of the keys that have a help text."""
    return {
        f"{name}.{field.name}": field.metadata["about"]
        for name, section in sections_in(Config(), "")
        for field in dataclasses.fields(cast(Any, section))
        if "about" in field.metadata
    }


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
