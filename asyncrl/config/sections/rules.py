"""A section of a configuration: its keys with their help texts, and the rules that hold among them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from asyncrl.errors import ConfigError

T = TypeVar("T")

LONGEST_NAME = 128
"""Bytes of a name: a file name holds 255, and some files of a run add to it."""


def key(default: T, about: str) -> T:
    """A field of a section.

    Args:
        default: A list or mapping is copied for each instance.
        about: The help text, which `asyncrl config --print`, docs/keys.md and the JSON Schema show.
    """
    metadata = {"about": about}
    if isinstance(default, (list, dict)):
        made: Any = dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    else:
        made = dataclasses.field(default=default, metadata=metadata)
    return cast(T, made)


class Rule(NamedTuple):
    """A condition on the values of a section, and the error for values that break it."""

    holds: bool
    key: str
    value: object
    rule: str
    remedy: str


class Section:
    """The base of all sections: frozen dataclasses whose fields are keys, or sections themselves."""

    def rules(self, at: str) -> Iterator[Rule]:
        """The rules among the keys of this section, whose dotted name is `at`. Each value is within its own limits."""
        yield from ()


def sections_in(section: Section, at: str) -> Iterator[tuple[str, Section]]:
    """(dotted name, section) of all sections in this one, and of itself last."""
    for field in dataclasses.fields(cast(Any, section)):
        inner = getattr(section, field.name)
        if isinstance(inner, Section):
            yield from sections_in(inner, f"{at}.{field.name}" if at else field.name)
    yield at, section


def errors_of(rules: Iterable[Rule]) -> Iterator[ConfigError]:
    """An error for each rule that is broken. Rules that raise an error themselves end with it."""
    try:
        for rule in rules:
            if not rule.holds:
                yield ConfigError(rule.key, rule.value, rule.rule, rule.remedy)
    except ConfigError as error:
        yield from error.each


def require(ok: bool, key: str, value: object, rule: str, remedy: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(key, value, rule, remedy)


def check_name(key: str, name: str) -> None:
    """Raise ConfigError for a text that `name_rule` refuses."""
    require(*name_rule(key, name))


def name_rule(key: str, name: str) -> Rule:
    """For a name that becomes a file name, a part of a metric's name, and a word on the command line."""
    fits = bool(name) and name.isprintable() and name == name.strip() and len(name.encode()) <= LONGEST_NAME
    return Rule(
        fits and not set("/\\") & set(name) and name[0] not in ".-",
        key,
        name,
        f"must be a plain name of at most {LONGEST_NAME} bytes, without / and \\, not beginning with . or -",
        "use letters, digits, - and _",
    )


def sampling_rules(at: str, top_p: float, min_p: float) -> Iterator[Rule]:
    """A truncated sampling distribution must keep at least one token."""
    yield Rule(
        0 < top_p <= 1,
        f"{at}.top_p",
        top_p,
        "is the mass of the tokens to draw from, above 0 and at most 1",
        f"set {at}.top_p=1.0 for all of them",
    )
    yield Rule(
        0 <= min_p < 1,
        f"{at}.min_p",
        min_p,
        "is a share of the likeliest token's probability, below 1",
        f"set {at}.min_p=0 for all tokens",
    )


def device_rules(key: str, devices: str | None) -> Iterator[Rule]:
    """For CUDA_VISIBLE_DEVICES of a pool. CUDA takes a word that it does not know for no GPU at all."""
    names = () if not devices else tuple(name.strip() for name in devices.split(","))
    yield Rule(
        all(name.isdecimal() or name.startswith(("GPU-", "MIG-")) for name in names),
        key,
        devices,
        "names GPUs by their numbers (0,1), or by GPU-… or MIG-…",
        f"set {key}=0,1, or leave it out for the GPUs that the shell has",
    )
    once = len(set(names)) == len(names)
    yield Rule(once, key, devices, "names a GPU twice", f"name each once, e.g. {key}=0,1")


def redis_url_rule(key: str, url: str | None) -> Rule:
    """For a URL that redis-py can read; whether a server answers there is not looked at."""
    try:
        parts = urlsplit(url or "redis:")
        fits = parts.scheme in ("redis", "rediss", "unix") and (parts.port is None or bool(parts.hostname))
    except ValueError:  # a port that is no number: its text may be a part of the password
        fits = False
    return Rule(
        url is None or fits,
        key,
        url,
        "is no URL of a Redis server: redis://, rediss:// (TLS) or unix://",
        f"write e.g. {key}=redis://127.0.0.1:6379/0; in a password write %2F for /, %40 for @ and %3A for :",
    )
