"""A section of a configuration: its keys with help texts and limits, the rules among them, and the checks of both.

The type of a key has its limits, `lease_s: Seconds = 30.0`; the JSON Schema has the same bounds (`json_schema.py`).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import functools
import math
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.yaml_values import escaped_references
from asyncrl.errors import ConfigError, call_all, raise_all
from asyncrl.system.redis_url import is_redis_url

T = TypeVar("T")
S = TypeVar("S", bound="Section")

LONGEST_NAME = 128
"""Bytes of a name: a file name holds 255, and some files of a run add to it."""

LONGEST_S = 2_000_000.0
"""Longest wait, 23 days: waits in milliseconds must fit into 31 bits."""

LONGEST_TEXT = 1 << 20
LONGEST_INT = 2**63 - 1


def key(default: T, about: str, *, home: bool = False) -> T:
    """A field of a section. default: a list or mapping is copied for each instance · about: the help text, which
    `asyncrl config --print`, docs/keys.md and the JSON Schema show · home: the value is a path that may begin with ~.
    """
    metadata = {"about": about, "home": home}
    if isinstance(default, (list, dict)):
        made: Any = dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    else:
        made = dataclasses.field(default=default, metadata=metadata)
    return cast(T, made)


class Rule(NamedTuple):
    """A condition on the values of a section, and the error for values that break it.

    key: dotted, as seen from the section · value: shown in the error; `...`: the one of the key
    """

    holds: bool
    key: str
    rule: str
    remedy: str
    value: object = ...


class Section:
    """The base of all sections: frozen dataclasses whose fields are keys, or sections themselves."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(cast(Any, self)):
            if field.metadata.get("home") and (path := getattr(self, field.name)) is not None:
                with suppress(ValueError):  # a character that no file can hold: `value_errors` names the key
                    object.__setattr__(self, field.name, os.path.expanduser(path))

    def rules(self, at: str) -> Iterator[Rule]:
        """The rules among the keys of this section, whose dotted name is `at`. Each value is within its own limits."""
        yield from ()


# ---------------------------------------------------------------------- limits


@dataclass(frozen=True, slots=True)
class Limit:
    """Bounds of a number. least and most are allowed values, above and below are not."""

    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None

    def broken(self, value: float) -> str | None:
        """The rule that `value` breaks; None if it breaks none.

        >>> Limit(above=0, most=10).broken(0), Limit(least=0, most=10).broken(11), Limit(above=0).broken(1)
        ('must be above 0', 'must be at most 10', None)
        """
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.least is not None and value < self.least:
            return "cannot be negative" if self.least == 0 else f"must be at least {self.least:g}"
        if self.most is not None and value > self.most:
            return f"must be at most {_shown(self.most)}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return None

    def remedy(self, key: str, value: float) -> str:
        """A value that would do."""
        if self.most is not None and value > self.most:
            return f"set {key}={_shown(self.most)} or less"
        if self.below is None and self.least is not None:
            return f"set {key}={self.least:g}"
        if self.above == 0 and isinstance(value, int):
            return f"set {key}=1 or more"
        return f"set {key} within this, or leave it out for its default"


ANY_INT, ANY_FLOAT = Limit(least=-LONGEST_INT, most=LONGEST_INT), Limit()

Count = Annotated[int, Limit(above=0, most=2**31 - 1)]
Amount = Annotated[int, Limit(least=0, most=2**31 - 1)]
Seed = Annotated[int, Limit(least=0, most=LONGEST_INT)]
Bytes = Annotated[int, Limit(above=0, most=LONGEST_INT)]
AnyBytes = Annotated[int, Limit(least=0, most=LONGEST_INT)]
Processes = Annotated[int, Limit(above=0, most=100_000)]
Threads = Annotated[int, Limit(above=0, most=4096)]
Seconds = Annotated[float, Limit(above=0, most=LONGEST_S)]
Port = Annotated[int, Limit(least=0, most=65535)]
Positive = Annotated[float, Limit(above=0, most=1e30)]
NotNegative = Annotated[float, Limit(least=0, most=1e30)]
Share = Annotated[float, Limit(least=0, most=1)]
BelowOne = Annotated[float, Limit(least=0, below=1)]


@functools.cache
def limits_of(schema: type) -> Mapping[str, Limit | None]:
    """{field: its limit} of a section, for the fields that are no section; None where the type bounds no number."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {name: _limit_in(hint) for name, hint in hints.items() if not dataclasses.is_dataclass(hint)}


def _limit_in(hint: Any) -> Limit | None:
    """The limit of a type: of an alternative of a union, of the members of a list or tuple."""
    if typing.get_origin(hint) is Annotated:
        return next((extra for extra in hint.__metadata__ if isinstance(extra, Limit)), None)
    if hint in (int, float):
        return ANY_INT if hint is int else ANY_FLOAT
    if typing.get_origin(hint) is dict:  # below it are a user's own keys
        return None
    return next(filter(None, map(_limit_in, typing.get_args(hint))), None)


def _shown(number: float) -> str:
    return str(int(number)) if float(number).is_integer() and abs(number) < 1e19 else f"{number:g}"


# ---------------------------------------------------------------------- checks


def check_section(section: Section, at: str = "") -> None:
    """Raise ConfigError for all values that are wrong by themselves; if there are none, for all rules that are broken.

    section: sections inside it are checked too · at: its dotted name; "" for the whole configuration
    """
    raise_all(value_errors(section, at))
    raise_all(error for name, one in sections_in(section, at) for error in _broken_rules(one, name))


def value_errors(section: Section, at: str) -> Iterator[ConfigError]:
    """An error for each number out of its limits and each text that no file can hold, also in the sections inside."""
    for name, one in sections_in(section, at):
        schema: type = type(one)
        for field, limit in limits_of(schema).items():
            for value in _scalars(getattr(one, field)):
                if isinstance(value, str):
                    yield from _text_errors(f"{name}.{field}", value)
                elif isinstance(value, (int, float)) and not isinstance(value, bool) and limit is not None:
                    yield from _number_errors(f"{name}.{field}", value, limit)


def sections_in(section: Section, at: str) -> Iterator[tuple[str, Section]]:
    """(dotted name, section) of all sections in this one, and of itself last."""
    for field in dataclasses.fields(cast(Any, section)):
        inner = getattr(section, field.name)
        if isinstance(inner, Section):
            yield from sections_in(inner, f"{at}.{field.name}" if at else field.name)
    yield at, section


def _broken_rules(section: Section, at: str) -> Iterator[ConfigError]:
    """An error for each rule that is broken. Rules that raise an error themselves end with it."""
    try:
        for rule in section.rules(at):
            if not rule.holds:
                value = attrgetter(rule.key)(section) if rule.value is ... else rule.value
                name = f"{at}.{rule.key}" if at else rule.key
                yield ConfigError(name, value, rule.rule, rule.remedy)
    except ConfigError as error:
        yield from error.each


def _scalars(value: Any) -> Iterator[Any]:
    """`value`, or what a list or mapping holds."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from (name, *_scalars(one))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _scalars(one)
    else:
        yield value


def _number_errors(key: str, value: float, limit: Limit) -> Iterator[ConfigError]:
    if isinstance(value, float) and not math.isfinite(value):
        remedy = f"set {key} to one, or leave it out for its default"
        yield ConfigError(key, value, "must be a finite number", remedy)
    elif broken := limit.broken(value):
        yield ConfigError(key, value, broken, limit.remedy(key, value))


def _text_errors(key: str, text: str) -> Iterator[ConfigError]:
    short = text if len(text) <= 40 else text[:40] + "…"
    if len(text) > LONGEST_TEXT:
        rule = f"is a text of {len(text)} characters, of at most {LONGEST_TEXT}"
        yield ConfigError(key, short, rule, "put it into a file")
    if "\0" in text or any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        yield ConfigError(
            key, short, "holds a character that no file can hold", "take \\0 and surrogates out"
        )


def require(ok: bool, key: str, value: object, rule: str, remedy: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(key, value, rule, remedy)


# ---------------------------------------------------------------------- entries that users name


def as_sections(schema: type[S], at: str, entries: Mapping[str, object]) -> dict[str, S]:
    """Each of `entries` as an instance of `schema`. Raises ConfigError for all that is wrong in them."""
    made = call_all(partial(as_section, schema, f"{at}.{name}", entry) for name, entry in entries.items())
    return dict(zip(entries, made, strict=True))


def as_section(
    schema: type[S],
    at: str,
    entry: object,
    *,
    keys: Sequence[str] = (),
    base: Mapping[str, object] | None = None,
) -> S:
    """`entry` as an instance of `schema`, checked under the dotted name `at`. keys: of the schema, that it may have;
    unless given, all · base: values that `entry` is merged with, in place of defaults

    Raises ConfigError for what is no mapping, for another key and for a value of another type.
    """
    if not isinstance(entry, Mapping):
        raise ConfigError(
            at, entry, "must hold keys", f"write {at}: {{{dataclasses.fields(cast(Any, schema))[0].name}: …}}"
        )
    known = list(keys) or [field.name for field in dataclasses.fields(cast(Any, schema))]
    tree = OmegaConf.structured(schema)
    for name, _ in sections_in(schema(), ""):  # frozen, but still being filled in
        OmegaConf.set_readonly(OmegaConf.select(tree, name) if name else tree, False)
    for name, value in (base or {}).items():
        OmegaConf.update(tree, name, escaped_references(value), merge=True)
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
    check_section(section, at)
    return section


# ---------------------------------------------------------------------- rules of several sections


def check_name(key: str, name: str) -> None:
    """Raise ConfigError for a text that `name_rule` refuses."""
    rule = name_rule(key, name)
    require(rule.holds, key, name, rule.rule, rule.remedy)


def name_rule(key: str, name: str) -> Rule:
    """For a name that becomes a file name, a part of a metric's name, and a word on the command line."""
    fits = bool(name) and name.isprintable() and name == name.strip() and len(name.encode()) <= LONGEST_NAME
    return Rule(
        fits and not set("/\\") & set(name) and name[0] not in ".-",
        key,
        f"must be a plain name of at most {LONGEST_NAME} bytes, without / and \\, not beginning with . or -",
        "use letters, digits, - and _",
        name,
    )


def sampling_rules(at: str, top_p: float, min_p: float, stop: Sequence[str]) -> Iterator[Rule]:
    """A truncated sampling distribution must keep at least one token, and a turn may not end before it begins."""
    yield Rule(
        0 < top_p <= 1,
        "top_p",
        "is the mass of the tokens to draw from, above 0 and at most 1",
        f"set {at}.top_p=1.0 for all of them",
    )
    yield Rule(
        0 <= min_p < 1,
        "min_p",
        "is a share of the likeliest token's probability, below 1",
        f"set {at}.min_p=0 for all tokens",
    )
    yield Rule(
        all(stop),
        "stop",
        "has an empty text, which every turn begins with",
        "leave that text out",
        list(stop),
    )


def device_rules(at: str, devices: str | None) -> Iterator[Rule]:
    """For CUDA_VISIBLE_DEVICES of a pool. CUDA takes an unknown word for no GPU at all."""
    names = () if not devices else tuple(name.strip() for name in devices.split(","))
    yield Rule(
        all(name.isdecimal() or name.startswith(("GPU-", "MIG-")) for name in names),
        "devices",
        "names GPUs by their numbers (0,1), or by GPU-… or MIG-…",
        f"set {at}.devices=0,1, or leave it out for the GPUs that the shell has",
    )
    once = len(set(names)) == len(names)
    yield Rule(once, "devices", "names a GPU twice", f"name each once, e.g. {at}.devices=0,1")


def redis_url_rule(at: str, url: str | None) -> Rule:
    """For a URL that redis-py can read; whether a server answers there is not looked at."""
    return Rule(
        url is None or is_redis_url(url),
        "redis_url",
        "is no URL of Redis: redis://, rediss:// (TLS), unix:// or redis+sentinel://HOST:PORT,HOST:PORT/PRIMARY/DB",
        f"write e.g. {at}.redis_url=redis://127.0.0.1:6379/0; in a password write %2F for /, %40 for @ and %3A for :",
    )


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argparse option: a whole number from `least` on.

    >>> at_least(1)("3")
    3
    """

    def number(word: str) -> int:
        if not word.removeprefix("-").isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word!r} is no whole number from {least} on")
        return int(word)

    return number
