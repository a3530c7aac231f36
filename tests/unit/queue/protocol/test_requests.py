"""A request arrives as the record that was sent, or its error names the verb, the key, the rule and the value."""

from __future__ import annotations

from dataclasses import asdict

import msgpack
import pytest

from asyncrl.errors import RefusedError, WireError
from asyncrl.queue.broker.handlers import HANDLERS
from asyncrl.queue.protocol.requests import (
    MAX_ITEMS,
    MAX_TEXT,
    VERBS,
    CommitRequest,
    pack_request,
    unpack_request,
)
from asyncrl.queue.protocol.settings import MAX_COUNT, Frontier, StreamSettings

COMMIT = CommitRequest(
    stream="train",
    ordinal=1,
    epoch=(1 << 40) + 1,
    tokens=9,
    nbytes=5,
    start_version=-1,
    digest=(1 << 64) - 1,
    columns=("rewards",),
)


def test_a_record_arrives_as_it_was_sent_and_absent_fields_have_their_defaults() -> None:
    assert unpack_request("commit", pack_request(COMMIT), [b"gr", b"oup"]) == COMMIT
    fields = msgpack.unpackb(pack_request(COMMIT))
    assert "squares" not in fields
    assert unpack_request("commit", msgpack.packb({**fields, "of_a_newer_client": [1]}), [b"group"]) == COMMIT


def test_every_verb_has_one_handler() -> None:
    assert {*VERBS.values()} == {*HANDLERS}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"ordinal": "x"}, r"commit: Expected `int`, got `str` - at `\$\.ordinal`, which is 'x'"),
        ({"ordinal": True}, r"commit: .*`bool` - at `\$\.ordinal`, which is True"),
        (
            {"stream": "s" * (MAX_TEXT + 1)},
            rf"commit: .*length <= {MAX_TEXT} - at `\$\.stream`, which is 'sss",
        ),
        ({"tokens": MAX_COUNT}, r"commit: .*`\$\.tokens`, which is 1099511627776"),
        ({"columns": ["a", "a"]}, "commit: columns: .* none twice"),
        ({"columns": [1]}, r"commit: .*`\$\.columns\[0\]`, which is \[1\]"),
        ({"wait_s": float("nan")}, r"commit: .*`\$\.wait_s`, which is nan"),
        ({"wait_s": 3601}, r"commit: .*<= 3600.*`\$\.wait_s`, which is 3601"),
        ({"nbytes": 6}, "commit: 5 payload bytes, 6 announced"),
    ],
)
def test_an_error_names_verb_key_rule_and_value(changes: dict[str, object], error: str) -> None:
    fields = {**msgpack.unpackb(pack_request(COMMIT)), **changes}
    with pytest.raises(WireError, match=error):
        unpack_request("commit", msgpack.packb(fields), [b"group"])


def test_counts_that_could_outgrow_the_journal_are_refused() -> None:
    """Its numbers have 64 bits, and a lease's epoch has the lineage above 40 of them."""
    settings = asdict(StreamSettings(2, 1, 1, 1 << 41, 1 << 30, 30.0))
    opening = {"stream": "train", "settings": {**settings, "groups_per_version": MAX_COUNT}}
    with pytest.raises(WireError, match=r"`\$\.settings\.groups_per_version`"):
        unpack_request("open", msgpack.packb(opening))
    with pytest.raises(ValueError, match=r"`\$\.lineage`"):
        Frontier.from_wire({**Frontier().to_wire(), "lineage": 1 << 22})


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(RefusedError, match="unknown_op: explode"):
        unpack_request("explode", b"\x80")
    with pytest.raises(WireError, match="commit: Object missing required field `stream`"):
        unpack_request("commit", b"\x80")
    for packed in (b"", b"\x90", b"\xc1", b"\x91" * 100_000, b"\x81\xa6stream\xa1\xff"):
        with pytest.raises(WireError, match="commit: "):
            unpack_request("commit", packed)


@pytest.mark.parametrize("count", [MAX_ITEMS + 1, (1 << 32) - 1])
@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("give_back", {"leases": []}),
        ("renew", {"leases": {"train": []}}),
        ("submit", {"tasks": []}),
        ("collect", {"got": []}),
        ("abandon", {"dropped": []}),
        ("commit", {"columns": []}),
        ("open", {"settings": {"columns": []}}),
        ("open", {"settings": {"stages": []}}),
        ("open", {"settings": {"stages": [{"needs": []}]}}),
    ],
)
def test_a_list_longer_than_allowed_is_refused_before_there_is_room_for_it(
    verb: str, fields: dict[str, object], count: int
) -> None:
    packed = msgpack.packb(fields)
    assert packed.endswith(b"\x90")
    with pytest.raises(WireError, match="array` of length"):
        unpack_request(verb, packed[:-1] + b"\xdd" + count.to_bytes(4, "big"))
