"""JSON Schema of configuration files, by which editors complete keys, explain them and mark mistakes.

It is made from the types, comments and limits of the schema's dataclasses. It cannot express rules between keys, and it
takes `${…}` wherever a value may stand.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from asyncrl.config.commented_yaml import key_comments
from asyncrl.config.load import sections
from asyncrl.config.rules import Limit
from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import GENERATORS, OF_A_POOL, GeneratorConfig
from asyncrl.config.sections.placement import PlaceConfig
from asyncrl.config.sections.reward import OWN, RewardConfig
from asyncrl.config.sections.tasks import EvaluationSet, MixedSource

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that the YAML language server supports well."""

REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}
"""`${run.name}` or `${oc.env:HOME}`, in place of a value of any type."""

ENTRIES: Mapping[str, tuple[type, tuple[str, ...] | None]] = {
    "tasks.mixture": (MixedSource, None),
    "evaluation.sets": (EvaluationSet, None),
    "reward.functions": (RewardConfig, OWN),
    "placement.own": (PlaceConfig, None),
    GENERATORS: (GeneratorConfig, OF_A_POOL),
}
"""Keys whose entries users name: the section of one entry, and its keys unless all."""

SIMPLE: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": ["string", "number"]},  # 12 is taken for '12'
    type(None): {"type": "null"},
}


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file, with `include`."""
    of_file = _section(Config(), "")
    of_file["properties"]["include"] = {
        "description": "files that are merged before this one, beside it or in configs/",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return {"$schema": DIALECT, "title": "asyncrl configuration", **of_file}


def _section(section: Any, prefix: str, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    """section: an object of defaults, some set by the section around it · keys: of the section, unless all."""
    made: Any = type(section)
    hints = typing.get_type_hints(made, include_extras=True)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        if keys is not None and field.name not in keys:
            continue
        key, default = f"{prefix}{field.name}", getattr(section, field.name)
        if field.name in sections(made):
            properties[field.name] = _section(default, f"{key}.")
        else:
            properties[field.name] = _key(key, default, hints[field.name])
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _key(key: str, default: Any, hint: Any) -> dict[str, Any]:
    if key in ENTRIES:
        made, keys = ENTRIES[key]
        allowed = {"type": ["object", "null"], "additionalProperties": _section(made(), f"{key}.", keys)}
    else:
        allowed = _type(hint)
    known: dict[str, Any] = {}
    if about := key_comments().get(key):
        known["description"] = about
    if default not in (None, "???") and isinstance(default, (bool, int, float, str)):
        known["default"] = default
    if "enum" in allowed:  # editors complete what stands right here
        return {**known, **allowed}
    return {**known, "anyOf": [*allowed.get("anyOf", [allowed]), REFERENCE]}


def _type(hint: Any) -> dict[str, Any]:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return {**SIMPLE[inside[0]], **_bounds(hint.__metadata__)}
    if hint in SIMPLE:
        return dict(SIMPLE[hint])
    if origin is typing.Literal:
        return {"enum": list(inside)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_type(one) for one in inside]}
    if origin in (list, tuple):
        return {"type": "array", "items": _type(inside[0])}
    if origin is dict:
        return {
            "type": ["object", "null"],
            **({} if inside[1] is Any else {"additionalProperties": _type(inside[1])}),
        }
    return {}


def _bounds(extras: tuple[Any, ...]) -> dict[str, Any]:
    limit = next(extra for extra in extras if isinstance(extra, Limit))
    bounds = {
        "exclusiveMinimum": limit.above,
        "minimum": limit.least,
        "maximum": limit.most,
        "exclusiveMaximum": limit.below,
    }
    return {name: bound for name, bound in bounds.items() if bound is not None}
