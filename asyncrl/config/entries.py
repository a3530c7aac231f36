"""Entries that users name themselves, `section.several.<name>: {…}`, as a section each."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.limits import check
from asyncrl.config.sections.rules import Section, require
from asyncrl.config.yaml_values import escaped_references
from asyncrl.errors import ConfigError, call_all

S = TypeVar("S", bound=Section)


def as_sections(schema: type[S], at: str, entries: Mapping[str, object]) -> dict[str, S]:
    """Each of `entries` as an instance of `schema`. Raises ConfigError for all that is wrong in them."""
    made = call_all(partial(as_section, schema, f"{at}.{name}", entry) for name, entry in entries.items())
    return dict(zip(entries, made, strict=True))


def as_section(schema: type[S], at: str, entry: object) -> S:
    """`entry` as an instance of `schema`, checked under the dotted name `at`. Raises ConfigError for what is no
    mapping, for a key that `schema` does not have and for a value of another type."""
    if not isinstance(entry, Mapping):
        raise ConfigError(at, entry, "must hold keys", f"write {at}: {{source: …}}")
    known = [field.name for field in dataclasses.fields(cast(Any, schema))]
    tree = OmegaConf.structured(schema)
    OmegaConf.set_readonly(tree, False)  # frozen, but still being filled in
    for name, value in entry.items():
        near = difflib.get_close_matches(str(name), known, n=1)
        remedy = f"did you mean {at}.{near[0]}?" if near else f"the keys are {', '.join(known)}"
        require(name in known, f"{at}.{name}", value, "no such key", remedy)
        try:
            OmegaConf.update(tree, name, escaped_references(value), merge=True)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            rule = str(error).partition("\n")[0].rstrip(".")
            raise ConfigError(f"{at}.{name}", value, rule, "give a value of this type") from None
    section = cast(S, OmegaConf.to_object(tree))
    check(section, at)
    return section
