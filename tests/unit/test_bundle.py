"""Messages come out of a bundle as they went in; what is no bundle is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.queue import bundle, wire

messages = st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=5), max_size=30)


@given(messages)
def test_messages_survive_in_their_order(sent: list[list[bytes]]) -> None:
    bundles = bundle.bundled(sent)
    assert [message for frames in bundles for message in bundle.messages_of(frames)] == sent
    assert len(bundles) == min(len(sent), 1)


@pytest.mark.parametrize(
    ("sizes", "bundles"),
    [([300_000, 200_000, 30_000, 1], 2), ([600_000, 1, 600_000], 3), ([1, 1, 1], 1), ([], 0)],
)
def test_a_bundle_is_of_so_many_bytes_unless_one_message_is_larger(sizes: list[int], bundles: int) -> None:
    assert len(bundle.bundled([[bytes(size)] for size in sizes])) == bundles


def test_a_bundle_is_of_no_more_frames_than_a_message() -> None:
    sent = [[b"x"] * 300] * 7
    bundles = bundle.bundled(sent)
    assert [len(frames) for frames in bundles] == [901, 901, 300]
    assert max(map(len, bundles)) <= wire.MAX_FRAMES


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"ARLQ\x03\x80", b"payload"],
        [bundle.MAGIC + b"\x01", b"x"],
        [bundle.MAGIC + b"\x02\x00", b"x"],
        [bundle.MAGIC + b"\x01\x00", b"x", b"y"],
        [bundle.MAGIC + b"\xff\xff" * 3],
    ],
)
def test_what_is_no_bundle_is_one_message(frames: list[bytes]) -> None:
    assert bundle.messages_of(frames) == [frames]
