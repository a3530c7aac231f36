"""Every event survives the journal's bytes; anything else is refused by name."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import JournalError
from asyncrl.queue.ledger.events import LATER, Event
from asyncrl.queue.ledger.lookahead import Lookahead
from asyncrl.queue.protocol.settings import MAX_COUNT, Frontier, StageSettings, StreamSettings
from asyncrl.queue.storage.records import SCHEMA, Happened, decode_record, encode_record

EVENTS = {kind.__name__: kind for kind in get_args(Event)}
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
COUNTS = st.integers(0, MAX_COUNT - 1)
NAMES = st.text("abc", min_size=1, max_size=4)
STAGES = st.lists(NAMES, unique=True, max_size=3).map(
    lambda names: tuple(StageSettings(name, needs=("x",), adds=(name,)) for name in names)
)
FIELDS = {
    int: NUMBERS,
    tuple[int, ...]: st.lists(NUMBERS).map(tuple),
    tuple[tuple[int, ...], ...]: st.lists(st.lists(NUMBERS).map(tuple)).map(tuple),
    Lookahead: st.builds(Lookahead, NUMBERS),
    StreamSettings: st.builds(
        StreamSettings,
        groups_per_version=st.integers(1, 8),
        max_staleness=st.none() | st.integers(1, 4),
        window=st.just(1),
        depth=st.integers(8, 100),
        max_bytes=st.integers(1, 1 << 40),
        lease_s=st.floats(0.1, 100),
        stages=STAGES,
    ),
    Frontier: st.builds(
        Frontier,
        version=COUNTS,
        trained=st.lists(COUNTS).map(tuple),
        dropped=st.dictionaries(NAMES, COUNTS),
        published=st.dictionaries(COUNTS, COUNTS),
    ),
}


@pytest.mark.parametrize("name", EVENTS)
@given(data=st.data())
def test_every_event_comes_back_as_it_was(name: str, data: st.DataObject) -> None:
    hints = get_type_hints(EVENTS[name])
    drawn = {
        field: data.draw(FIELDS[hint] if hint in FIELDS else st.from_type(hint))
        for field, hint in hints.items()
    }
    event = EVENTS[name](**drawn)
    again = decode_record(encode_record(Happened("train", event)))
    assert repr(again) == repr(Happened("train", event))  # a NaN is no equal of itself


def test_a_record_is_its_name_and_its_values() -> None:
    requeued = encode_record(Happened("train", EVENTS["Requeued"](7, "expired")))
    assert msgpack.unpackb(requeued) == ["Requeued", "train", [7, "expired"]]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (["Nothing", "", [1]], "unknown kind 'Nothing'"),
        (["Requeued", "train", [7]], "Requeued: Expected `array` of length 2, got 1"),
        (["Requeued", "train", [7, "expired", 1]], "Requeued: Expected `array` of length 2, got 3"),
        (["Requeued", "train", ["7", "expired"]], "Requeued: Expected `int`, got `str`"),
        (["Requeued", "train", [True, "expired"]], "Requeued: Expected `int`, got `bool`"),
        (["Committed", "train", [1, 2, 3, 4, 5, [6], 0]], "Committed: Expected `str`, got `int`"),
        (["StreamState", "", ["train", {"tasks": {"dropped": 1}}]], "StreamState: "),
        (["Requeued", [7, "expired"]], "a record: "),
        ([], "a record: "),
        (7, "a record: "),
    ],
)
def test_what_is_no_record_is_refused_by_name(tree: object, said: str) -> None:
    with pytest.raises(JournalError, match=said):
        decode_record(msgpack.packb(tree))


@pytest.mark.parametrize(
    "fields",
    [b"\x91" * 100_000, b"\x92\x07\xa1\xff", b"\x92\x07", b"\xc1", b""],
    ids=lambda fields: fields[:4].hex(),
)
def test_fields_that_are_no_msgpack_are_refused(fields: bytes) -> None:
    """Among them lists too deep for the interpreter's stack, and text that is no UTF-8."""
    with pytest.raises(JournalError):
        decode_record(b"\x93\xa8Requeued\xa5train" + fields)


@given(st.binary(max_size=40))
def test_garbage_is_refused(packed: bytes) -> None:
    with suppress(JournalError):
        decode_record(packed)


def test_fields_that_older_journals_lack_have_their_defaults() -> None:
    older = decode_record(msgpack.packb(["Committed", "train", [1, 2, 3, 4, 5]]))
    assert isinstance(older, Happened)
    assert older.event == EVENTS["Committed"](1, 2, 3, 4, 5)
    for name in LATER & {f"{kind}.{field}" for kind, event in EVENTS.items() for field in event._fields}:
        kind, _, field = name.partition(".")
        assert field in EVENTS[kind]._field_defaults


def test_the_schema_has_every_class_of_a_record() -> None:
    for known in (
        "Requeued(ordinal,why)",
        "StageSettings(name,needs,adds)",
        "TasksKept(stream,tasks)",
        "Tasks(",
    ):
        assert known in SCHEMA
