"""No reply has more frames or bytes than a client reads: the broker grants and hands out less, and the rest later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from dispatcher_cases import FOREVER, TRAIN
from hypothesis import given
from hypothesis import strategies as st
from raw_request import envelope

from asyncrl.queue.broker.dispatcher import Dispatcher
from asyncrl.queue.broker.queue_state import QueueState, Reply
from asyncrl.queue.protocol.settings import StageSettings
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.envelope import REPLY_BYTES, ReplyRoom, unpack_replies

GROUPS = 1100


class Desk:
    """A dispatcher and one client, which reads each reply before its next request."""

    def __init__(self, **changes: Any) -> None:
        self.dispatcher = Dispatcher(QueueState("run"))
        self.number = 0
        shape = {"groups_per_version": GROUPS, "depth": GROUPS, "lease_s": FOREVER}
        settings = replace(TRAIN, **{**shape, **changes})
        self.ask("open", settings=asdict(settings))

    def ask(self, op: str, frames: Sequence[bytes] = (), **args: Any) -> tuple[Any, list[int]]:
        """The value of the reply, or the reason of the refusal; and the lengths of its frames. As a client reads it."""
        self.number += 1
        nbytes = {"nbytes": sum(map(len, frames))} if frames else {}
        request = envelope(op, self.number, frames=len(frames), stream="train", **nbytes, **args)
        replies = self.dispatcher.receive(b"client", [request, *frames], 0.0)
        (reply,) = replies or self.dispatcher.tick(0.0)  # without anything to bring
        ((_, value, error, payload),) = unpack_replies(reply.frames)
        return value if error is None else error[1], [*map(len, payload)]

    def submit(self, sizes: Sequence[int]) -> Any:
        tasks = [[ordinal, bytes(size)] for ordinal, size in enumerate(sizes)]
        return self.ask("submit", tasks=tasks, min_version=0)[0]

    def lease(self, most: int = GROUPS) -> tuple[list[Any], list[int]]:
        return self.ask("lease", held=0, lineage=0, most=most)

    def keep_progress(self, frames: Sequence[int]) -> None:
        """Of as many tasks, which are pending again."""
        leases, _ = self.lease()
        for (ordinal, epoch, *_), count in zip(leases, frames, strict=False):
            assert self.ask("progress", [b"x"] * count, ordinal=ordinal, epoch=epoch)[0] is None
        self.ask("give_back", leases=[lease[:2] for lease in leases])

    def commit(self, frames: Sequence[Sequence[bytes]]) -> list[Any]:
        """As many groups."""
        leases, _ = self.lease(len(frames))
        facts = {"tokens": 1, "start_version": 0, "digest": 1}
        return [
            self.ask("commit", payload, ordinal=ordinal, epoch=epoch, **facts)[0]
            for (ordinal, epoch, *_), payload in zip(leases, frames, strict=True)
        ]

    def claim(self, received: int = 0) -> tuple[Any, list[int]]:
        at = {"learner_epoch": 1, "step": 0, "index": 0, "rank": 0, "max_tokens": 1 << 20, "whole": False}
        return self.ask("claim", received=received, **at)


# ---------------------------------------------------------------------- the rule


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, REPLY_BYTES // 2)), max_size=9))
def test_a_reply_takes_what_fits_and_its_first_part_in_any_case(sizes: list[tuple[int, int]]) -> None:
    room, taken = ReplyRoom(), []
    for frames, nbytes in sizes:
        if not room.take(frames, nbytes):
            break
        taken.append((frames, nbytes))
    totals = [sum(part) for part in zip(*taken, strict=True)] or [0, 0]
    assert len(taken) <= 1 or (totals[0] <= wire.MAX_FRAMES - 1 and totals[1] <= REPLY_BYTES)
    assert bool(taken) == bool(sizes)
    if len(taken) < len(sizes):
        frames, nbytes = sizes[len(taken)]
        assert totals[0] + frames > wire.MAX_FRAMES - 1 or totals[1] + nbytes > REPLY_BYTES


# ---------------------------------------------------------------------- tasks


@pytest.mark.parametrize(
    ("progress", "granted"), [([1023], 1), ([500, 523], 2), ([500, 524], 1), ([500, 525], 1), ([341] * 4, 3)]
)
def test_leases_have_no_more_progress_than_a_reply_has_frames(progress: list[int], granted: int) -> None:
    """1,023 behind the envelope. Other tasks are granted with the next request."""
    desk = Desk()
    desk.submit([4] * len(progress))
    desk.keep_progress(progress)
    first, frames = desk.lease()
    assert [(ordinal, count) for ordinal, _, _, count in first] == [*enumerate(progress[:granted])]
    assert len(frames) == sum(progress[:granted])
    if granted < len(progress):
        second, _ = desk.lease()
        assert [lease[0] for lease in second] == [*range(granted, len(progress))]


def test_leases_have_no_more_tasks_than_64_mb() -> None:
    desk = Desk()
    assert desk.submit([]) is None
    third = REPLY_BYTES // 3
    for ordinal in range(4):  # each in a message of its own
        tasks = [[ordinal, bytes(third)]]
        assert desk.ask("submit", tasks=tasks, min_version=0)[0] is None
    granted = [lease[0] for lease in desk.lease()[0]]
    assert granted == [0, 1]  # the third of them would leave no room for what else is in the reply
    assert [lease[0] for lease in desk.lease()[0]] == [2, 3]


def test_a_task_that_no_reply_has_room_for_is_refused() -> None:
    desk = Desk()
    assert desk.submit([REPLY_BYTES + 1]) == "large"
    assert desk.submit([9, REPLY_BYTES + 1]) == "large"
    assert desk.dispatcher.queue.refused["large"] == 2
    assert desk.submit([REPLY_BYTES]) is None
    leases, _ = desk.lease()
    assert len(leases[0][2]) == REPLY_BYTES
    state, _ = desk.ask("peek", ordinal=0)
    assert (state["state"], len(state["task"])) == ("leased", REPLY_BYTES)


# ---------------------------------------------------------------------- groups


@pytest.mark.parametrize(("groups", "first"), [(1023, 1023), (1024, 1023), (1025, 1023)])
def test_a_claim_comes_in_parts(groups: int, first: int) -> None:
    desk = Desk(groups_per_version=groups)
    desk.submit([1] * groups)
    desk.commit([[b"%d" % ordinal] for ordinal in range(groups)])
    value, frames = desk.claim()
    assert (value["ordinals"], len(frames)) == ([*range(first)], first)
    assert (value["share"], value["so_far"], value["last"]) == (groups, groups, True)
    if groups > first:
        value, frames = desk.claim(received=first)
        assert (value["ordinals"], len(frames)) == ([*range(first, groups)], groups - first)
        assert value["share"] == groups


def test_a_claim_comes_in_parts_of_64_mb() -> None:
    """A group that is larger comes alone."""
    desk = Desk(groups_per_version=4)
    desk.submit([1] * 4)
    half = bytes(REPLY_BYTES // 2)
    assert desk.commit([[half], [half], [half], [half, half, half]]) == [None] * 4
    parts, received = [], 0
    while received < 4:
        value, _ = desk.claim(received)
        parts.append(value["ordinals"])
        received += len(value["ordinals"])
    assert parts == [[0, 1], [2], [3]]


@pytest.mark.parametrize(("sizes", "first"), [([600, 423], [0, 1]), ([600, 424], [0]), ([600, 425], [0])])
def test_a_collect_brings_the_rest_with_the_next(sizes: list[int], first: list[int]) -> None:
    desk = Desk(max_staleness=None, window=None)
    desk.submit([1] * 2)
    desk.commit([[b"x"] * size for size in sizes])
    value, frames = desk.ask("collect", learner_epoch=1)
    assert (value["ordinals"], len(frames)) == (first, sum(sizes[: len(first)]))
    value, _ = desk.ask("collect", learner_epoch=1, got=first)
    assert value.get("ordinals", []) == [ordinal for ordinal in (0, 1) if ordinal not in first]


@pytest.mark.parametrize(
    ("sizes", "granted"), [([600, 419], 2), ([600, 420], 2), ([600, 421], 2), ([600, 424], 1)]
)
def test_leases_of_a_stage_have_no_more_frames_than_a_reply(sizes: list[int], granted: int) -> None:
    desk = Desk(stages=(StageSettings("critic", adds=("values",)),))
    desk.submit([1] * 2)
    desk.commit([[b"x"] * size for size in sizes])
    value, frames = desk.ask("stage_lease", stage="critic", most=9)
    assert [grant[0] for grant in value] == [0, 1][:granted]
    assert len(frames) == sum(sizes[:granted])
    if granted < 2:
        value, _ = desk.ask("stage_lease", stage="critic", most=9)
        assert [grant[0] for grant in value] == [1]


@pytest.mark.parametrize(("stages", "most"), [(0, 1023), (1, 1021), (3, 1017)])
def test_a_group_with_its_columns_fits_into_a_reply_or_is_refused(stages: int, most: int) -> None:
    """Two frames for the columns of each stage. A task whose group is refused is dropped: it would become the same."""
    desk = Desk(stages=tuple(StageSettings(f"{i}", adds=(f"{i}",)) for i in range(stages)))
    desk.submit([1] * 2)
    if most < 1023:
        assert desk.commit([[b"x"] * (most + 1)]) == ["large"]
        counts = desk.dispatcher.queue.streams["train"].ledger.counts(0.0)
        assert (counts["dropped_by_reason"], counts["leased"]) == ({"large": 1}, 0)
    assert desk.commit([[b"x"] * most]) == [None]
    for stage in range(stages):
        ((ordinal, epoch, *_),), _ = desk.ask("stage_lease", stage=f"{stage}", most=1)
        at = {"stage": f"{stage}", "ordinal": ordinal, "epoch": epoch, "version": 0, "digest": 0}
        assert desk.ask("stage_commit", [b"a", b"b", b"c"], **at)[0] == ""  # as malformed
        assert desk.ask("stage_commit", [b"a", b"b"], **at)[0] is None
    value, frames = desk.ask("peek", ordinal=1 if stages else 0)
    assert (value["state"], len(frames)) == ("ready", most + 2 * stages)


# ---------------------------------------------------------------------- whatever else


@pytest.mark.parametrize(
    "reply",
    [Reply(None, [b""] * 1024), Reply(bytes(wire.MAX_ENVELOPE_BYTES)), Reply([bytes(1 << 20)] * 64)],
    ids=["frames", "bytes", "bytes of many"],
)
def test_a_reply_that_nobody_could_read_is_a_refusal(reply: Reply) -> None:
    """The client has an answer at once, not a deadline."""
    desk = Desk()
    desk.dispatcher._handle = lambda *_: reply
    assert desk.ask("hello") == ("large", [])
    assert desk.dispatcher.queue.refused["large"] == 1
