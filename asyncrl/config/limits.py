"""Which numbers and texts a key takes, written in its type: `lease_s: Seconds = 30.0`.

`check` compares the values of a section with them. The JSON Schema has the same bounds (`json_schema.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from asyncrl.config.sections.rules import Rule, Section, errors_of, sections_in
from asyncrl.errors import ConfigError, raise_all

LONGEST_S = 2_000_000.0
"""Longest wait, 23 days: waits in milliseconds must fit into 31 bits."""

LONGEST_TEXT = 1 << 20
LONGEST_INT = 2**63 - 1


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
Positive = Annotated[float, Limit(above=0, most=1e30)]
NotNegative = Annotated[float, Limit(least=0, most=1e30)]
Share = Annotated[float, Limit(least=0, most=1)]
BelowOne = Annotated[float, Limit(least=0, below=1)]


def check(section: Section, at: str = "") -> None:
    """Raise ConfigError for all values that are wrong by themselves; if there are none, for all rules that are broken.

    Args:
        section: Sections inside it are checked too.
        at: The dotted name of the section; "" for the whole configuration.
    """
    raise_all(value_errors(section, at))
    raise_all(error for at, one in sections_in(section, at) for error in errors_of(one.rules(at)))


def value_errors(section: Section, at: str) -> Iterator[ConfigError]:
    """An error for each value out of its limits, also in the sections inside."""
    for name, one in sections_in(section, at):
        yield from errors_of(_value_rules(one, name))


@functools.cache
def limits_of(schema: type) -> Mapping[str, Limit | None]:
    """{field: its limit} of a section, for the fields that are no section; None where the type bounds no number."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {name: _limit_in(hint) for name, hint in hints.items() if not dataclasses.is_dataclass(hint)}


def _value_rules(section: Section, at: str) -> Iterator[Rule]:
    """Each number is within its limits and finite, each text one that a file can hold."""
    schema: type = type(section)
    for name, limit in limits_of(schema).items():
        key = f"{at}.{name}"
        for value in _scalars(getattr(section, name)):
            if isinstance(value, str):
                yield from _text_rules(key, value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool) and limit is not None:
                yield _number_rule(key, value, limit)


def _limit_in(hint: Any) -> Limit | None:
    """The limit of a type: of an alternative of a union, of the members of a list or tuple."""
    if typing.get_origin(hint) is Annotated:
        return next((extra for extra in hint.__metadata__ if isinstance(extra, Limit)), None)
    if hint in (int, float):
        return ANY_INT if hint is int else ANY_FLOAT
    if typing.get_origin(hint) is dict:  # below it are a user's own keys
        return None
    return next(filter(None, map(_limit_in, typing.get_args(hint))), None)


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


def _number_rule(key: str, value: float, limit: Limit) -> Rule:
    if isinstance(value, float) and not math.isfinite(value):
        remedy = f"set {key} to one, or leave it out for its default"
        return Rule(False, key, value, "must be a finite number", remedy)
    broken = limit.broken(value)
    return Rule(broken is None, key, value, broken or "", limit.remedy(key, value))


def _text_rules(key: str, text: str) -> Iterator[Rule]:
    short = text if len(text) <= 40 else text[:40] + "…"
    rule = f"is a text of {len(text)} characters, of at most {LONGEST_TEXT}"
    yield Rule(len(text) <= LONGEST_TEXT, key, short, rule, "put it into a file")
    whole = "\0" not in text and not any(0xD800 <= ord(character) <= 0xDFFF for character in text)
    yield Rule(whole, key, short, "holds a character that no file can hold", "take \\0 and surrogates out")


def _shown(number: float) -> str:
    return str(int(number)) if float(number).is_integer() and abs(number) < 1e19 else f"{number:g}"
