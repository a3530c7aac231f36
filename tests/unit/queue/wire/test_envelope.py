"""Requests and replies come out of their messages as they went in; what is no message is said to be none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WireError
from asyncrl.queue.wire import envelope, wire
from asyncrl.queue.wire.envelope import ClientMessage, WireRequest

PAYLOADS = st.lists(st.lists(st.binary(max_size=9), max_size=4), max_size=9)


def call(payloads: list[list[bytes]]) -> ClientMessage:
    asked = [
        WireRequest(i + 1, f"op{i}", wire.pack_value({"i": i}), frames) for i, frames in enumerate(payloads)
    ]
    return ClientMessage(len(asked), [i + 1 for i in range(len(asked))], "run", "w/1", asked)


@given(PAYLOADS)
def test_requests_come_out_as_they_went_in(payloads: list[list[bytes]]) -> None:
    said = call(payloads)
    (message,) = envelope.pack_calls(said)
    heard = envelope.unpack_call(message)
    assert (heard.newest, heard.waiting, heard.run, heard.session) == (
        said.newest,
        said.waiting,
        "run",
        "w/1",
    )
    assert [(a.number, a.op, a.args, [*a.frames]) for a in heard.requests] == [
        (a.number, a.op, a.args, [*a.frames]) for a in said.requests
    ]


@given(PAYLOADS)
def test_replies_come_out_as_they_went_in(payloads: list[list[bytes]]) -> None:
    parts = [envelope.pack_reply(i, {"i": i}, None, frames) for i, frames in enumerate(payloads)]
    messages = envelope.pack_replies(parts)
    assert len(messages) == min(len(parts), 1)
    replies = [reply for message in messages for reply in envelope.unpack_replies(message)]
    assert [(n, value, [*frames]) for n, value, _, frames in replies] == [
        (i, {"i": i}, frames) for i, frames in enumerate(payloads)
    ]


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ([1 << 20] * 3, 3),
        ([1 << 10] * 300, 1),
        ([1 << 19] * 4, 4),
        ([1 << 18] * 4, 2),
        ([1, 1 << 20, 1], 3),
        ([9 << 20], 1),
    ],
)
def test_a_message_is_of_so_many_bytes_unless_one_part_is_larger(sizes: list[int], messages: int) -> None:
    assert len(envelope.pack_calls(call([[bytes(size)] for size in sizes]))) == messages


def test_a_message_is_of_so_many_frames() -> None:
    messages = envelope.pack_calls(call([[b""] * 300] * 7))
    assert [len(frames) for frames in messages] == [901, 901, 301]
    assert len(envelope.pack_calls(call([[b""] * (wire.MAX_FRAMES - 1)] * 2))) == 2


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [wire.pack({})],
        [wire.pack({"replies": 1})],
        [wire.pack({"replies": [[1, None, None, 0]]})],
        [wire.pack({"replies": [wire.pack_value([1, None, None])]})],
        [wire.pack({"replies": [wire.pack_value(["1", None, None, 0])]})],
    ],
)
def test_what_is_no_reply(frames: list[Any]) -> None:
    with pytest.raises(WireError):
        envelope.unpack_replies(frames)
