"""Messages of the RPC servers come out as they went in; what is none is refused before it takes much memory."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest

from asyncrl.errors import WireError
from asyncrl.rpc import message
from asyncrl.rpc.message import OK, PROTOCOL, decode, encode, sealed


def test_a_message_comes_out_as_it_went_in() -> None:
    fields = {"layout": {"w": [[2, 3], "float32", [[[0, 0], [2, 3]]]]}, "data": b"x" * 100_000}
    assert decode(encode(7, OK, fields)) == (7, OK, fields)


@pytest.mark.parametrize("inner", [b"\x90", b"\x80"], ids=["lists", "maps"])
def test_a_message_has_so_many_lists_and_maps(inner: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a byte on the wire takes 90 in memory. The message itself is a list, and its fields are a map."""
    monkeypatch.setattr(message, "UNCHECKED_BYTES", 0)
    monkeypatch.setattr(message, "MAX_LISTS", 103)
    assert len(decode(packed(inner, 100))[2]["x"]) == 100
    with pytest.raises(WireError, match="more than 103 lists"):
        decode(packed(inner, 101))


def test_a_flood_of_lists_is_not_unpacked_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message, "MAX_LISTS", 1 << 16)
    frame = packed(b"\x90", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="lists"):
            decode(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def packed(inner: bytes, count: int) -> bytes:
    """A message with so many of these in a list."""
    head = msgpack.packb([PROTOCOL, 1, OK])[1:]
    return sealed(b"\x94" + head + b"\x81\xa1x\xdd" + count.to_bytes(4, "big") + inner * count)
