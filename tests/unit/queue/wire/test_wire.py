"""Envelopes are versioned; what is none, and a task that is none, is a WireError that says what is wrong."""

from __future__ import annotations

import threading
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WireError
from asyncrl.queue.wire import wire
from asyncrl.types import Task


def test_envelopes_are_versioned() -> None:
    message = {"id": 1, "op": "hello", "args": {"a": [1, None, b"x"]}}
    assert wire.unpack(wire.pack(message)) == message
    later = bytearray(wire.pack(message))
    later[4] = 9
    with pytest.raises(WireError, match="protocol version 9, this side speaks 5"):
        wire.unpack(bytes(later))
    with pytest.raises(WireError, match="not a message of this protocol"):
        wire.unpack(b"GET / HTTP/1.1")
    with pytest.raises(WireError, match="expected a map, got int"):
        wire.unpack(wire.ENVELOPE_MAGIC + b"\x01")


@given(st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_noise_is_a_wire_error(noise: bytes) -> None:
    with pytest.raises(WireError):
        wire.unpack(noise)
    with pytest.raises(WireError):
        wire.task_from_wire(msgpack.packb({"not": noise}))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.sampled_from(["x" * 300, "x" * 70_000, b"x" * 300, b"x" * 70_000])
    | st.builds(msgpack.ExtType, st.integers(0, 99), st.binary(max_size=20) | st.just(bytes(300))),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner, max_size=20),
)


def count(value: Any) -> int:
    inner = [each for pair in value.items() for each in pair] if isinstance(value, dict) else value
    return 1 + (sum(map(count, inner)) if isinstance(inner, list) else 0)


@given(VALUES)
def test_values_are_counted_before_they_are_unpacked(value: Any) -> None:
    packed = memoryview(msgpack.packb(value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_VALUES", count(value))
        wire._check_values(packed)
        patch.setattr(wire, "MAX_VALUES", count(value) - 1)
        with pytest.raises(WireError, match="more than"):
            wire._check_values(packed)


@pytest.mark.parametrize(
    "task", [Task(0, "x"), Task(7, [{"role": "user", "content": "2+2=é"}], {"n": [1.5]})]
)
def test_a_task_survives(task: Task) -> None:
    assert wire.task_from_wire(wire.task_to_wire(task)) == task


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        ([1, "x"], r"a task is \[ordinal, prompt, data\]"),
        ([-1, "x", {}], "a task with ordinal -1"),
        ([1, 5, {}], "a prompt of type int"),
        ([1, "x", 5], "task 1: data of type int"),
    ],
)
def test_a_task_that_is_none_is_refused(packed: Any, says: str) -> None:
    with pytest.raises(WireError, match=says):
        wire.task_from_wire(msgpack.packb(packed))


def test_what_could_not_be_packed_leaves_nothing_in_the_next_message() -> None:
    with pytest.raises(TypeError):
        wire.pack_value(["something before", object()])
    assert wire.unpack_value(wire.pack_value([1])) == [1]


def test_threads_pack_at_the_same_time() -> None:
    values = [{"thread": i, "text": "x" * 1000 * i} for i in range(8)]
    failed: list[int] = []

    def pack(i: int) -> None:
        if any(wire.unpack_value(wire.pack_value(values[i])) != values[i] for _ in range(300)):
            failed.append(i)

    threads = [threading.Thread(target=pack, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
