"""The records of the queue's journal, everything that the next broker needs to go on where one ended, as msgpack.

    Happened      an event of a stream's ledger
    TasksKept     the bytes of submitted tasks
    Posted        an entry of the run's registry
    Closed        the run is over
    StreamState   a snapshot of a ledger's state, in place of all its earlier events

A record is packed as follows. Never pickle.

    None, bool, int, float, str, bytes      as they are; an int of more than 64 bits as ["int", "digits"]
    tuple, list, set, frozenset             ["tuple", member, …]
    dict, Counter                           ["dict", key, value, key, value, …]
    a member of an Enum                     ["State", "READY"]
    a dataclass or NamedTuple               ["Leased", value, value, …] in the order of its fields

A class is known by the annotations of its fields.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgpack

from asyncrl.errors import JournalError
from asyncrl.queue.ledger.events import Event
from asyncrl.queue.ledger.state.ledger_state import LedgerState


class Happened(NamedTuple):
    stream: str
    event: Event


class TasksKept(NamedTuple):
    """(ordinal, packed task) …"""

    stream: str
    tasks: tuple[tuple[int, bytes], ...]


class Posted(NamedTuple):
    key: str
    value: bytes


class Closed(NamedTuple):
    reason: str


class StreamState(NamedTuple):
    stream: str
    state: LedgerState


Record = Happened | TasksKept | Posted | Closed | StreamState

SCALARS = frozenset((type(None), bool, int, float, str, bytes))
SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
}
MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter}
LARGE = "int"
NOT_CLASSES = frozenset((*SEQUENCES, *MAPPINGS, LARGE))
MAX_NESTING = 64


class Codec:
    """classes: dataclasses, NamedTuples and enums; with them the codec knows all that their fields may hold.

    ValueError if two of them have the same name.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._kinds: dict[str, Kind] = {}
        for known in dict.fromkeys(held for cls in classes for held in _held_by(cls)):
            if known.__name__ in self._kinds or known.__name__ in NOT_CLASSES:
                raise ValueError(f"two classes are called {known.__name__}")
            self._kinds[known.__name__] = Kind(known)
        self._by_class = {kind.cls: kind for kind in self._kinds.values()}

    @property
    def schema(self) -> str:
        """Names of the classes and their fields: what both sides of a journal must agree on."""
        return ";".join(f"{tag}({','.join(kind.names)})" for tag, kind in sorted(self._kinds.items()))

    def encode(self, value: object) -> bytes:
        """TypeError for a value of a class that is not known."""
        return msgpack.packb(self._dump(value), use_bin_type=True, default=_large)

    def decode(self, packed: bytes) -> Any:
        """The value of `encode`. JournalError names the tag or the field that is wrong."""
        try:
            tree = msgpack.unpackb(packed, raw=False, use_list=True)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise JournalError(f"a record that is not msgpack: {error}") from error
        return self._load(tree, 0)

    # ------------------------------------------------------------------ to plain lists

    def _dump(self, value: Any) -> Any:
        cls = type(value)
        if cls in SCALARS:
            return value
        kind = self._by_class.get(cls)
        if kind is not None:
            return [cls.__name__, *[v if type(v) in SCALARS else self._dump(v) for v in kind.take(value)]]
        if cls.__name__ in SEQUENCES:
            return [cls.__name__, *map(self._dump, value)]
        if cls.__name__ in MAPPINGS:
            return [cls.__name__, *map(self._dump, chain.from_iterable(value.items()))]
        raise TypeError(f"{cls.__name__} is unknown to the codec")

    # ------------------------------------------------------------------ and back

    def _load(self, tree: Any, depth: int) -> Any:
        if type(tree) is not list:
            return tree
        if not tree or type(tree[0]) is not str or depth > MAX_NESTING:
            raise JournalError(f"a record without a tag: {str(tree)[:80]}")
        tag, values = tree[0], [self._load(member, depth + 1) for member in tree[1:]]
        try:
            if tag in SEQUENCES:
                return SEQUENCES[tag](values)
            if tag == LARGE and len(values) == 1:
                return int(values[0])
            if tag in MAPPINGS:
                return MAPPINGS[tag](dict(zip(values[::2], values[1::2], strict=True)))
            if tag in self._kinds:
                return self._kinds[tag].make(values)
        except (TypeError, ValueError, KeyError) as error:
            raise JournalError(f"{tag}: {error}") from error
        raise JournalError(f"a record of unknown kind {tag!r}")


class Kind:
    """One class that the codec knows. `names`: its fields."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        if issubclass(cls, Enum):
            self.names: Sequence[str] = ("name",)
            self._allowed: Sequence[frozenset[type] | None] = (frozenset((str,)),)
            self._build: Callable[..., Any] = cls.__getitem__
        else:
            hints = get_type_hints(cls)
            self.names = _field_names(cls) or ()
            self._allowed, self._build = [_allowed(hints[name]) for name in self.names], cls
        self.take = _taker(self.names)

    def make(self, values: list[Any]) -> Any:
        if len(values) != len(self.names):
            raise JournalError(f"{self.cls.__name__}: {len(values)} values for {len(self.names)} fields")
        for name, value, allowed in zip(self.names, values, self._allowed, strict=True):
            if allowed is not None and type(value) not in allowed:
                raise JournalError(
                    f"{self.cls.__name__}.{name} = {str(value)[:80]!r} is a {type(value).__name__}"
                )
        return self._build(*values)


def _held_by(hint: Any) -> Iterator[type]:
    """The dataclasses, NamedTuples and enums that a value of this type may consist of.

    >>> [cls.__name__ for cls in _held_by(Counter[str] | None)]
    []
    """
    if isinstance(hint, type) and (_field_names(hint) is not None or issubclass(hint, Enum)):
        yield hint
        inside = () if issubclass(hint, Enum) else get_type_hints(hint).values()
    else:
        inside = get_args(hint)
    for part in inside:
        yield from _held_by(part)


def _large(value: Any) -> list[str]:
    """For what msgpack cannot pack."""
    if type(value) is int:
        return [LARGE, str(value)]
    raise TypeError(f"{type(value).__name__} is unknown to the codec")


def _field_names(cls: type) -> Sequence[str] | None:
    """The field names of a dataclass or NamedTuple, in order; None: it is neither."""
    if is_dataclass(cls):
        return [field.name for field in fields(cls)]
    return getattr(cls, "_fields", None)


def _allowed(hint: Any) -> frozenset[type] | None:
    """The classes that a value of this type may have; None: any.

    >>> sorted(cls.__name__ for cls in _allowed(float | None))
    ['NoneType', 'float', 'int']
    """
    origin = get_origin(hint) or hint
    if origin is object:
        return None
    if origin in (Union, types.UnionType):
        parts = [_allowed(part) for part in get_args(hint)]
        return None if None in parts else frozenset().union(*(part for part in parts if part is not None))
    if origin is float:
        return frozenset((float, int))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return frozenset((dict, Counter))
    return frozenset((origin,)) if isinstance(origin, type) else None


def _taker(names: Sequence[str]) -> Callable[[Any], Iterable[Any]]:
    if not names:
        return lambda value: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


CODEC = Codec(get_args(Record))
