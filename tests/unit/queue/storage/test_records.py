"""Every event survives the codec; anything else is refused by name."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from typing import get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import JournalError
from asyncrl.queue.ledger.events import Event
from asyncrl.queue.protocol.settings import Frontier, StageSettings, StreamSettings
from asyncrl.queue.storage.records import Codec

EVENTS = get_args(Event)
CODEC = Codec(EVENTS)

NAMES = st.text("abc", min_size=1, max_size=4)
STAGES = st.lists(NAMES, unique=True, max_size=3).map(
    lambda names: tuple(StageSettings(name, needs=("x",), adds=(name,)) for name in names)
)
st.register_type_strategy(
    StreamSettings,
    st.builds(
        StreamSettings,
        groups_per_version=st.integers(1, 8),
        max_staleness=st.none() | st.integers(1, 4),
        window=st.just(1),
        depth=st.integers(8, 100),
        max_bytes=st.integers(1, 1 << 40),
        lease_s=st.integers(1, 9) | st.floats(0.1, 100),
        stages=STAGES,
    ),
)
COUNTS = st.dictionaries(st.integers(), st.integers())
st.register_type_strategy(
    Frontier, st.builds(Frontier, dropped=st.dictionaries(NAMES, st.integers()), published=COUNTS)
)


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_event_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    event = data.draw(st.from_type(kind))
    again = CODEC.decode(CODEC.encode(event))
    assert repr(again) == repr(event)  # a NaN is no equal of itself


def test_a_record_is_its_name_and_its_values() -> None:
    requeued = CODEC.encode(EVENTS_BY_NAME["Requeued"](7, "expired"))
    assert msgpack.unpackb(requeued) == ["Requeued", 7, "expired"]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (["Nothing", 1], "unknown kind 'Nothing'"),
        (["Requeued", 7], "Requeued: 1 values for 2 fields"),
        (["Requeued", 7, "expired", 1], "Requeued: 3 values for 2 fields"),
        (["Requeued", "7", "expired"], "Requeued.ordinal = '7' is a str"),
        (["Requeued", True, "expired"], "Requeued.ordinal = 'True' is a bool"),
        (["Committed", 1, 2, 3, 4, 5, ["list"], 0], "Committed.columns"),
        (["StageSettings", "", ["tuple"], ["tuple"]], "StageSettings: "),
        (["dict", 1], "dict: "),
        (["dict", ["list"], 1], "dict: "),
        (["set", ["list"]], "set: "),
        ([], "without a tag"),
        ([7], "without a tag"),
    ],
)
def test_what_is_no_record_is_refused_by_name(tree: list[object], said: str) -> None:
    with pytest.raises(JournalError, match=said):
        CODEC.decode(msgpack.packb(tree))


@given(st.binary(max_size=40))
def test_garbage_is_refused_or_plain(packed: bytes) -> None:
    with suppress(JournalError):
        CODEC.decode(packed)


def test_deep_nesting_is_refused() -> None:
    tree: list[object] = ["tuple"]
    for _ in range(100):
        tree = ["tuple", tree]
    with pytest.raises(JournalError):
        CODEC.decode(msgpack.packb(tree))


@dataclass
class Box:
    inside: object


@dataclass(slots=True)
class Held:
    counts: Counter[str]
    boxes: list[Box]
    seen: set[tuple[int, int]]


def test_classes_are_known_by_the_fields_that_hold_them() -> None:
    codec = Codec([Held])
    held = Held(Counter(a=1), [Box(3), Box("x")], {(1, 2)})
    again = codec.decode(codec.encode(held))
    assert again == held
    assert type(again.counts) is Counter
    assert codec.schema == "Box(inside);Held(counts,boxes,seen)"


def test_an_unknown_class_and_a_name_taken_twice_are_bugs() -> None:
    with pytest.raises(TypeError, match="Held is unknown"):
        CODEC.encode(Held(Counter(), [], set()))
    with pytest.raises(ValueError, match="two classes are called Box"):
        Codec([Box, make_dataclass("Box", [("inside", int)])])


EVENTS_BY_NAME = {kind.__name__: kind for kind in EVENTS}
