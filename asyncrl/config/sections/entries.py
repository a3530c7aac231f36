"""Entries that users name themselves, `section.several.<name>: {…}`, as a dataclass each."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.sections.rules import require
from asyncrl.config.yaml_values import escaped_references
from asyncrl.errors import ConfigError

Section = TypeVar("Section")


def as_section(schema: type[Section], key: str, entry: object) -> Section:
    """`entry` as an instance of `schema`. Raises ConfigError for what is no mapping, for a key that `schema` does not
    have and for a value of another type."""
    if not isinstance(entry, Mapping):
        raise ConfigError(key, entry, "must hold keys", f"write {key}: {{source: …}}")
    known = [field.name for field in dataclasses.fields(cast(Any, schema))]
    tree = OmegaConf.structured(schema)
    OmegaConf.set_readonly(tree, False)  # frozen, but still being filled in
    for name, value in entry.items():
        near = difflib.get_close_matches(str(name), known, n=1)
        remedy = f"did you mean {key}.{near[0]}?" if near else f"the keys are {', '.join(known)}"
        require(name in known, f"{key}.{name}", value, "no such key", remedy)
        try:
            OmegaConf.update(tree, name, escaped_references(value), merge=True)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            rule = str(error).partition("\n")[0].rstrip(".")
            raise ConfigError(f"{key}.{name}", value, rule, "give a value of this type") from None
    return cast(Section, OmegaConf.to_object(tree))
