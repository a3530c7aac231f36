"""Values that cross from one process to another as JSON: plain data by value, everything else by reference.

    None, True, "a", 1          as they are
    ["i", hex]  ["f", hex]      large ints; floats, bit by bit
    ["l", …] ["t", …] …         lists, tuples, sets, frozensets, dicts (as pairs)
    ["b", hex] ["c", …] …       bytes, complex, ranges, Decimal, Fraction; types of plain data by name
    anything else               `Refer` makes a reference, such as ["o", 7], and `Resolve` reads it

An instance of a subclass (Counter, a named tuple, an IntEnum) crosses as its base, a number of numpy as Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Refer = Callable[[Any], list[Any]]
Resolve = Callable[[str, Any], Any]

DEEPEST = 100
EXACT = 1 << 53
TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range, type(None))
}
SEQUENCES: dict[type, tuple[str, Callable[[Any], Iterable[Any]]]] = {
    # The methods of the base: those of a subclass may be the program's own.
    list: ("l", list.__iter__),
    tuple: ("t", tuple.__iter__),
    set: ("s", set.__iter__),
    frozenset: ("z", frozenset.__iter__),
}
BUILDERS: dict[str, Callable[[list[Any]], Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}


class DataError(ValueError):
    """The received value is not one that `encode` makes."""


def encode(value: Any, refer: Refer, depth: int = 0) -> Any:
    """Raises ValueError for a value that contains itself, or is deeper than DEEPEST."""
    if depth > DEEPEST:
        raise ValueError(f"a value is nested more than {DEEPEST} times")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, (str, int, float, complex, bytes, bytearray)):
        return _scalar(value)
    for base, (tag, items) in SEQUENCES.items():
        if isinstance(value, base):
            return [tag, *(encode(item, refer, depth + 1) for item in items(value))]
    if isinstance(value, dict):
        return ["d", *([encode(part, refer, depth + 1) for part in pair] for pair in dict.items(value))]
    if kind in (range, Decimal, Fraction):
        return _number(value)
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return ["T", value.__name__]
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and getattr(value, "shape", None) == ():
        return encode(value.item(), refer, depth + 1)
    return refer(value)


def _scalar(value: Any) -> Any:
    """A text, number or bytes, without the methods of a subclass."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -EXACT < number < EXACT else ["i", hex(number)]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    return ["b", bytes(value).hex()]


def _number(value: Any) -> list[Any]:
    if isinstance(value, range):
        return ["r", hex(value.start), hex(value.stop), hex(value.step)]
    if isinstance(value, Fraction):
        return ["F", hex(value.numerator), hex(value.denominator)]
    return ["D", str(value)]


def decode(wire: Any, resolve: Resolve) -> Any:
    """The value. Raises DataError for what `encode` does not make; the sender may be hostile."""
    try:
        return _decoded(wire, resolve, 0)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{type(error).__name__}: {error}") from None


def _decoded(wire: Any, resolve: Resolve, depth: int) -> Any:
    if depth > DEEPEST:
        raise DataError("too deep")
    if wire is None or type(wire) in (bool, int, str):
        return wire
    if type(wire) is not list or not wire or type(wire[0]) is not str:
        raise DataError("neither a plain value nor a tag with its parts")
    tag, parts = wire[0], wire[1:]
    if tag in BUILDERS:
        return BUILDERS[tag]([_decoded(part, resolve, depth + 1) for part in parts])
    if tag == "d":
        return {_decoded(k, resolve, depth + 1): _decoded(v, resolve, depth + 1) for k, v in parts}
    if tag in ATOMS:
        return ATOMS[tag](*parts)
    (part,) = parts
    return resolve(tag, part)


def _integer(text: str) -> int:
    return int(text, 16)


ATOMS: dict[str, Callable[..., Any]] = {
    "i": _integer,
    "f": float.fromhex,
    "b": bytes.fromhex,
    "c": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "r": lambda start, stop, step: range(_integer(start), _integer(stop), _integer(step)),
    "F": lambda above, below: Fraction(_integer(above), _integer(below)),
    "D": lambda text: Decimal(str(text)),
    "T": lambda name: TYPES[name],
}
