"""Real clients against a real broker on a loopback port, whatever it keeps where, and against a queue without sockets.

Only the leases' clock is turned by hand.
"""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from queue_cases import (
    EVAL,
    LEASE_S,
    TRAIN,
    WAIT_S,
    AnyQueue,
    B,
    claim,
    group,
    lease,
    ordinals,
    parked,
    refusal,
    serving,
    tasks,
)

from asyncrl.errors import (
    ConfigError,
    DeadlineError,
    RefusedError,
    RunClosedError,
    SourceEndedError,
    WireError,
)
from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.client import client as client_module
from asyncrl.queue.client.client import BlockingClient, QueueClient
from asyncrl.queue.feeder import feed
from asyncrl.queue.protocol.replies import Claim, Lease, Opened
from asyncrl.queue.protocol.requests import CommitRequest
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.queue.wire import envelope, wire
from asyncrl.queue.wire.payload import encode_group
from asyncrl.types import Task


async def test_a_task_goes_round(queue: AnyQueue) -> None:
    learner, feeder, worker = [await queue.client(who) for who in ("learner", "feeder", "worker")]
    opened = await learner.open("train", TRAIN)
    assert opened == Opened(learner_epoch=1, lineage=0, version=0)
    assert await feeder.room("train", WAIT_S) == (0, TRAIN.depth)
    await feeder.submit("train", tasks(0, B))
    leases = await lease(worker, B)
    assert [x.task for x in leases] == tasks(0, B)
    for one in leases:
        await worker.commit("train", one, group(one.task, 0))
    await worker.renew({"tokens": 48, "busy": {"compute": 1.5}})
    claimed = await claim(learner, opened, step=0)
    assert (ordinals(claimed.groups), claimed.last, claimed.so_far) == ([0, 1, 2, 3], True, B)
    assert claimed.groups[3].token_ids.tolist() == [3] * 12
    assert {worker.split("/")[0] for worker in claimed.workers} == {"worker"}
    assert claimed.groups[3].task == tasks(3, 1)[0]
    trained = await learner.trained("train", learner_epoch=1, step=0)
    assert trained.version == 1
    assert trained.stats == {"worker": {"tokens": 48, "busy": {"compute": 1.5}}}
    assert (trained.depth["trained"], trained.depth["bytes"]) == (B, 0)


async def test_leases_park_until_the_stream_opens_and_admission_moves(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    early = asyncio.create_task(lease(worker, 2 * B))
    feeding = asyncio.create_task(learner.submit("train", tasks(0, 3 * B)))
    await parked(queue, 2)
    opened = await learner.open("train", TRAIN)
    await feeding
    leases = await early
    assert ordinals(leases) == list(range(2 * B))  # η = 1: two versions' worth
    later = asyncio.create_task(lease(worker, B, held=1))
    for one in leases[:B]:
        await worker.commit("train", one, group(one.task, 0))
    await claim(learner, opened, step=0)
    await parked(queue, 1)
    assert not later.done()
    await learner.trained("train", learner_epoch=1, step=0)
    assert ordinals(await later) == list(range(2 * B, 3 * B))


async def test_a_wait_that_runs_out_is_answered_empty(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", TRAIN)
    waits = [
        asyncio.create_task(worker.lease("train", held=0, lineage=0, most=1, wait_s=5.0)),
        asyncio.create_task(claim_or_none(learner, opened)),
        asyncio.create_task(learner.lookup("weights/0", wait_s=5.0)),
    ]
    await parked(queue, 3)
    queue.clock.now = 6.0
    leases, claimed, found = await asyncio.gather(*waits, return_exceptions=True)
    assert (leases, claimed) == ([], None)
    assert isinstance(found, DeadlineError)


async def claim_or_none(learner: QueueClient, opened: Opened) -> Claim | None:
    epoch = opened.learner_epoch
    return await learner.claim(
        "train", learner_epoch=epoch, step=0, index=0, rank=0, max_tokens=9, whole=False, wait_s=5.0
    )


async def test_the_directory_parks_a_lookup_until_the_post(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    looking = asyncio.create_task(worker.lookup("weights/0", wait_s=WAIT_S))
    await parked(queue, 1)
    await learner.post("weights/0", {"endpoint": "tcp://127.0.0.1:1", "world": 2, "lineage": 0})
    assert await looking == {"endpoint": "tcp://127.0.0.1:1", "world": 2, "lineage": 0}


async def test_a_lease_that_is_not_renewed_goes_to_another_and_is_fenced(queue: AnyQueue) -> None:
    learner, dead, alive = [await queue.client(who) for who in ("learner", "dead", "alive")]
    await learner.open("train", TRAIN)
    await learner.submit("train", tasks(0, 2))
    lost, kept = await lease(dead, 1), await lease(alive, 1)
    queue.clock.now = LEASE_S - 1
    assert (await alive.renew()).lost == []
    waiting = asyncio.create_task(lease(alive, 2))
    await parked(queue, 1)
    queue.clock.now = LEASE_S + 1
    again = await waiting
    assert ordinals(again) == [0]
    assert await refusal(dead.commit("train", lost[0], group(lost[0].task, 0))) == "fenced"
    for one in [*kept, *again]:
        await alive.commit("train", one, group(one.task, 0))
    status = (await learner.status())["streams"]["train"]
    assert (status["ready"], status["leased"], status["pending"]) == (2, 0, 0)


async def test_a_worker_learns_which_leases_it_lost(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    await learner.open("train", TRAIN)
    await learner.submit("train", tasks(0, 1))
    (one,) = await lease(worker, 1)
    queue.clock.now = LEASE_S + 1
    other = await lease(await queue.client("other"), 1)
    renewal = await worker.renew()
    assert renewal.lost == [("train", 0, one.epoch)]
    assert other[0].epoch > one.epoch
    assert (await worker.renew()).lost == []


async def test_goodbye_give_back_and_drop(queue: AnyQueue) -> None:
    learner, leaver, worker = [await queue.client(who) for who in ("learner", "leaver", "worker")]
    await learner.open("train", TRAIN)
    await learner.submit("train", tasks(0, 3))
    await lease(leaver, 1)
    second, third = await lease(worker, 2)
    await leaver.close()
    (first,) = await lease(worker, 1)
    assert first.task.ordinal == 0
    await worker.give_back("train", [second])
    (second_again,) = await lease(worker, 1)
    assert second_again.task.ordinal == 1
    await worker.drop("train", third, "reward")
    assert await refusal(worker.drop("train", third, "reward")) == "fenced"
    assert (await learner.status())["streams"]["train"]["dropped_by_reason"] == {"reward": 1}


async def test_scores_of_groups_are_given_out_until_they_have_come(queue: AnyQueue) -> None:
    """Of those that came with one: trained on, or dropped by a filter."""
    learner, feeder, worker = [await queue.client(who) for who in ("learner", "feeder", "worker")]
    await learner.open("train", TRAIN)
    await learner.submit("train", tasks(0, 4))
    first, second, third, fourth = await lease(worker, 4)
    await worker.commit("train", first, group(first.task, 0), score=0.25)
    await worker.commit("train", second, group(second.task, 0))
    await worker.drop("train", third, "filtered", score=1.0)
    assert await feeder.scores("train", since=0) == (2, [(0, 0.25), (2, 1.0)])
    assert await feeder.scores("train", since=0) == (2, [(0, 0.25), (2, 1.0)]), "an answer may be lost"
    assert await feeder.scores("train", since=1) == (2, [(2, 1.0)])
    assert await refusal(worker.drop("train", third, "filtered", score=1.0)) == "fenced"
    await worker.drop("train", fourth, "reward")
    assert await feeder.scores("train", since=2) == (2, [])


async def test_a_cancelled_lease_request_leaves_nothing_behind(queue: AnyQueue) -> None:
    learner, fickle, worker = [await queue.client(who) for who in ("learner", "fickle", "worker")]
    await learner.open("train", TRAIN)
    waiting = asyncio.create_task(lease(fickle, 1))
    await parked(queue, 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    await fickle.renew()  # behind the cancellation on the same socket
    await learner.submit("train", tasks(0, 1))
    assert ordinals(await lease(worker, 1)) == [0]


async def test_two_ranks_get_disjoint_shares_of_one_claim(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    settings = StreamSettings(B, 1, 1, 2 * B, 1 << 30, LEASE_S, learners=2)
    opened = await learner.open("train", settings)
    await learner.submit("train", tasks(0, B))
    for one, length in zip(await lease(worker, B), (50, 10, 10, 10), strict=True):
        await worker.commit("train", one, group(one.task, 0, length))
    second = await claim(learner, opened, step=0, rank=1)
    first = await claim(learner, opened, step=0, rank=0)
    assert (ordinals(first.groups), ordinals(second.groups)) == ([0], [1, 2, 3])
    assert first.last
    assert second.last
    assert ordinals((await claim(learner, opened, step=0, rank=1)).groups) == [1, 2, 3]


async def claim_early(
    learner: QueueClient, opened: Opened, step: int, wait_s: float = WAIT_S, **about: Any
) -> Claim | None:
    """Of rank 0, two groups at most."""
    request = {"learner_epoch": opened.learner_epoch, "step": step, "index": 0, "rank": 0}
    tokens = 2 * len(group(tasks(0, 1)[0], 0).token_ids)
    return await learner.claim("train", **request, max_tokens=tokens, whole=False, wait_s=wait_s, **about)


async def begun_with_more(queue: AnyQueue, ready: int) -> tuple[QueueClient, QueueClient, Opened]:
    """A learner whose step 0 is made of the first B of so many groups."""
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", dataclasses.replace(TRAIN, max_staleness=2, depth=4 * B))
    await learner.submit("train", tasks(0, 3 * B))
    for one in (await lease(worker, 3 * B))[:ready]:
        await worker.commit("train", one, group(one.task, 0))
    assert ordinals((await claim(learner, opened, 0)).groups) == [0, 1, 2, 3]
    return learner, worker, opened


async def test_a_claim_comes_ahead_and_again_without_its_groups_once_the_step_runs(queue: AnyQueue) -> None:
    learner, _, opened = await begun_with_more(queue, ready=B + 3)
    early = await claim_early(learner, opened, 1, ahead=True)
    assert early is not None
    assert (ordinals(early.groups), early.ahead, early.last, early.so_far) == ([4, 5], True, False, 2)
    waiting = asyncio.create_task(claim_early(learner, opened, 1, attempt=early.attempt, received=2))
    await parked(queue, 1)
    await learner.trained("train", learner_epoch=opened.learner_epoch, step=0)
    again = await waiting
    assert again is not None
    assert (again.groups, again.ahead, again.last, again.so_far) == ([], False, False, 2)
    assert (await learner.status())["streams"]["train"]["claimed"] == 2


async def test_a_claim_to_which_a_group_could_be_added_does_not_come_ahead(queue: AnyQueue) -> None:
    learner, _, opened = await begun_with_more(queue, ready=B + 2)
    assert await claim_early(learner, opened, 1, wait_s=0.0, ahead=True) is None
    waiting = asyncio.create_task(claim_early(learner, opened, 1, ahead=True))
    await parked(queue, 1)
    await learner.trained("train", learner_epoch=opened.learner_epoch, step=0)
    claimed = await waiting
    assert claimed is not None
    assert (ordinals(claimed.groups), claimed.ahead) == ([4, 5], False)


async def test_a_group_that_cannot_be_read_ahead_is_dropped_once_the_step_runs(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", dataclasses.replace(TRAIN, max_staleness=2, depth=4 * B))
    await learner.submit("train", tasks(0, 3 * B))
    for one in await lease(worker, 3 * B):
        if one.task.ordinal == 5:
            await commit_damaged(worker, one)
        else:
            await worker.commit("train", one, group(one.task, 0))
    await claim(learner, opened, 0)
    assert await refusal(claim_early(learner, opened, 1, ahead=True)) == "abandoned"
    await learner.trained("train", learner_epoch=opened.learner_epoch, step=0)
    assert await refusal(claim_early(learner, opened, 1, ahead=True)) == "abandoned"
    claimed = await claim_early(learner, opened, 1, ahead=True)
    assert claimed is not None
    assert ordinals(claimed.groups) == [4, 6]


async def test_large_groups_travel_column_by_column(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", TRAIN)
    await learner.submit("train", tasks(0, B))
    for one in await lease(worker, B):
        await worker.commit("train", one, group(one.task, 0, length=20_000))
    claimed = await claim(learner, opened, step=0)
    assert [int(g.token_ids.sum()) for g in claimed.groups] == [o * 40_000 for o in range(B)]


async def train_one_step(learner: QueueClient, worker: QueueClient, opened: Opened, step: int) -> list[int]:
    leases = await lease(worker, B, held=step, lineage=opened.lineage)
    for one in leases:
        await worker.commit("train", one, group(one.task, step))
    claimed = await claim(learner, opened, step)
    await learner.trained("train", learner_epoch=opened.learner_epoch, step=step)
    return ordinals(claimed.groups)


async def test_a_learner_that_comes_back_rewinds_to_its_snapshot(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", TRAIN)
    await learner.open("eval", EVAL)
    await learner.submit("train", tasks(0, 3 * B))
    assert await train_one_step(learner, worker, opened, 0) == [0, 1, 2, 3]
    snapshot = await learner.snapshot("train", learner_epoch=1)
    assert await train_one_step(learner, worker, opened, 1) == [4, 5, 6, 7]
    (stale,) = await lease(worker, 1, held=2)

    assert await refusal(learner.open("train", TRAIN)) == "occupied"
    again = await learner.open("train", TRAIN, snapshot)
    assert again == Opened(learner_epoch=2, lineage=1, version=1)
    assert await refusal(learner.trained("train", learner_epoch=1, step=2)) == "fenced"
    assert await refusal(worker.commit("train", stale, group(stale.task, 2))) == "fenced"
    assert await refusal(lease(worker, 1, held=1, lineage=0)) == "lineage"
    assert await refusal(lease(worker, 1, held=1, lineage=0, stream="eval")) == "lineage"
    assert await refusal(learner.submit("train", tasks(99, 1))) == "gap"
    # The step since the snapshot comes again with its groups; then the next is made.
    claimed = await claim(learner, again, 1)
    assert [int(one.token_ids[0]) for one in claimed.groups] == [4, 5, 6, 7]
    await learner.trained("train", learner_epoch=2, step=1)
    assert await train_one_step(learner, worker, again, 2) == [8, 9, 10, 11]


async def test_a_learner_that_comes_back_further_than_the_queue_keeps_does_it_again(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", TRAIN)
    await learner.submit("train", tasks(0, 2 * B))
    snapshot = await learner.snapshot("train", learner_epoch=1)
    assert await train_one_step(learner, worker, opened, 0) == [0, 1, 2, 3]
    assert (await learner.status())["streams"]["train"]["retained_steps"] == 1
    await learner.checkpointed("train", learner_epoch=1, version=1)
    assert (await learner.status())["streams"]["train"]["retained_bytes"] == 0
    again = await learner.open("train", TRAIN, snapshot)
    first, _ = await learner.room("train", WAIT_S)
    await learner.submit("train", tasks(first, B))
    assert await train_one_step(learner, worker, again, 0) == [0, 1, 2, 3]


async def test_a_snapshot_opens_a_new_broker(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", TRAIN)
    await learner.submit("train", tasks(0, B))
    await train_one_step(learner, worker, opened, 0)
    snapshot = await learner.snapshot("train", learner_epoch=1)
    fresh = type(queue)()
    try:
        learner = await fresh.client("learner")
        await learner.open("eval", EVAL)
        assert await learner.open("train", TRAIN, snapshot) == Opened(1, 1, 1)
        streams = (await learner.status())["streams"]
        assert (streams["train"]["trained"], streams["eval"]["lineage"]) == (B, 1)
        with pytest.raises(WireError):
            await learner.open("train", TRAIN, snapshot[:-9])
    finally:
        await fresh.close()


async def test_a_rejected_step_is_made_of_other_groups(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", TRAIN)
    await learner.submit("train", tasks(0, 2 * B))
    for one in await lease(worker, 2 * B):
        await worker.commit("train", one, group(one.task, 0))
    assert ordinals((await claim(learner, opened, 0)).groups) == [0, 1, 2, 3]
    assert await learner.reject("train", learner_epoch=1, step=0, reason="loss") == B
    assert ordinals((await claim(learner, opened, 0)).groups) == [4, 5, 6, 7]
    depth = (await learner.trained("train", learner_epoch=1, step=0)).depth
    assert (depth["trained"], depth["dropped_by_reason"], depth["bytes"]) == (B, {"loss": B}, 0)


async def test_a_client_puts_the_parts_of_a_claim_together(
    queue: AnyQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three groups fit into a reply. One of the second part cannot be read: the step begins anew without it."""
    monkeypatch.setattr(envelope, "REPLY_FRAMES", 3)
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", dataclasses.replace(TRAIN, groups_per_version=7, depth=14))
    await learner.submit("train", tasks(0, 14))
    leases = [one for _ in range(14) for one in await lease(worker, 1)]
    for one in leases:
        if one.task.ordinal == 4:
            await commit_damaged(worker, one)
        else:
            await worker.commit("train", one, group(one.task, 0))
    assert await refusal(claim(learner, opened, 0)) == "abandoned"
    claimed = await claim(learner, opened, 0)
    assert ordinals(claimed.groups) == [0, 1, 2, 3, 5, 6, 7]
    assert (claimed.so_far, claimed.last, len(claimed.stamps)) == (7, True, 7)
    assert [name.partition("/")[0] for name in claimed.workers] == ["worker"] * 7


async def test_evaluation_waits_for_its_version_and_takes_any_order(queue: AnyQueue) -> None:
    learner, old, new = [await queue.client(who) for who in ("learner", "old", "new")]
    opened = await learner.open("eval", EVAL)
    await learner.submit("eval", tasks(0, 2), min_version=3)
    waiting = asyncio.create_task(lease(old, 1, held=2, stream="eval"))
    leases = await lease(new, 2, held=3, stream="eval")
    assert ordinals(leases) == [0, 1]
    assert not waiting.done()
    await new.commit("eval", leases[1], group(leases[1].task, 3))
    collected = await learner.collect("eval", learner_epoch=opened.learner_epoch, wait_s=WAIT_S)
    assert ordinals(collected) == [1]
    assert await learner.collect("eval", learner_epoch=opened.learner_epoch, wait_s=0.0) == []
    await learner.finish("done")
    with pytest.raises(RunClosedError):
        await waiting


async def test_finish_ends_every_ordinal_and_tells_everybody(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    await learner.open("train", TRAIN)
    feeder = await queue.client("feeder")
    feeding = asyncio.create_task(feed(feeder, "train", lambda o: tasks(o, 1)[0]))
    (one,) = await lease(worker, 1)
    waiting = asyncio.create_task(lease(worker, 2 * B, held=-1))
    await parked(queue, 2)
    await learner.finish("done")
    await learner.finish("again")
    await feeding
    with pytest.raises(RunClosedError, match="done"):
        await waiting
    with pytest.raises(RunClosedError):
        await worker.commit("train", one, group(one.task, 0))
    assert (await worker.renew()).closed
    train = (await learner.status())["streams"]["train"]
    assert train["dropped_by_reason"] == {"end": TRAIN.depth}
    assert (train["pending"], train["leased"], train["bytes"]) == (0, 0, 0)


async def test_the_feeder_keeps_the_stream_supplied_and_says_when_its_source_ends(queue: AnyQueue) -> None:
    learner, feeder, worker = [await queue.client(who) for who in ("learner", "feeder", "worker")]
    opened = await learner.open("train", TRAIN)

    def source(ordinal: int) -> Task:
        if ordinal >= 3 * B:
            raise SourceEndedError
        return tasks(ordinal, 1)[0]

    feeding = asyncio.create_task(feed(feeder, "train", source))
    trained = [o for step in range(3) for o in await train_one_step(learner, worker, opened, step)]
    assert trained == list(range(3 * B))
    assert await refusal(claim(learner, opened, 3)) == "exhausted"
    await learner.finish("exhausted")
    await feeding


async def test_the_feeder_begins_again_where_a_rewound_stream_stands() -> None:
    """The rewind comes between two requests: ordinals 4 and 5 are not the next ones any more."""
    rooms, submitted = [(4, 2), (1, 1)], []

    async def room(stream: str, wait_s: float) -> tuple[int, int]:
        if not rooms:
            raise RunClosedError("done")
        return rooms.pop(0)

    async def submit(stream: str, of_room: list[Task]) -> None:
        if rooms:
            raise RefusedError("gap")
        submitted.extend(of_room)

    client: Any = SimpleNamespace(room=room, submit=submit)
    assert "done" in await feed(client, "train", lambda ordinal: tasks(ordinal, 1)[0])
    assert submitted == tasks(1, 1)


async def test_tasks_that_are_too_large_for_one_message_come_in_several(
    queue: AnyQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_ENVELOPE_BYTES", 30_000)
    monkeypatch.setattr(client_module, "SUBMIT_BYTES", 20_000)
    learner, worker = await queue.client("learner"), await queue.client("worker")
    await learner.open("train", TRAIN)
    large = [Task(o, "x" * 9000) for o in range(2 * B)]
    await learner.submit("train", large)
    await learner.submit("train", [])
    leased = [one for _ in range(2 * B) for one in await lease(worker, 1)]
    assert [one.task for one in leased] == large


async def test_streams_that_are_rewound_one_after_another_end_in_one_lineage(queue: AnyQueue) -> None:
    """The one that is rewound last forks the others: its lineage is the run's."""
    learner, worker = await queue.client("learner"), await queue.client("worker")
    evals, opened = await learner.open("eval", EVAL), await learner.open("train", TRAIN)
    before = [
        await learner.snapshot("eval", learner_epoch=evals.learner_epoch),
        await learner.snapshot("train", learner_epoch=opened.learner_epoch),
    ]
    await learner.submit("train", tasks(0, 2 * B))
    await train_one_step(learner, worker, opened, 0)
    await learner.open("eval", EVAL, before[0])
    again = await learner.open("train", TRAIN, before[1])
    streams = (await learner.status())["streams"]
    assert {streams["train"]["lineage"], streams["eval"]["lineage"]} == {again.lineage}
    assert len(await lease(worker, B, lineage=again.lineage)) == B


async def test_another_run_is_kept_out(queue: AnyQueue) -> None:
    assert await refusal(queue.client("stranger", run="other")) == "wrong_run"


async def test_nobody_at_the_address_is_a_deadline() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        lonely = QueueClient(f"tcp://127.0.0.1:{port}", run="run", who="lonely", deadline_s=0.2)
        with pytest.raises(DeadlineError, match=r"lonely waited 0\.2 s for the queue at tcp://127"):
            await lonely.connect()
        await lonely.close()


async def test_a_close_that_is_cancelled_or_comes_twice_disconnects() -> None:
    """A socket that stays open keeps its process from ending."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
        port = deaf.bind_to_random_port("tcp://127.0.0.1")
        client = QueueClient(f"tcp://127.0.0.1:{port}", run="run", who="hurried", deadline_s=WAIT_S)
        hello = asyncio.create_task(client.connect())
        await asyncio.to_thread(deaf.recv_multipart)
        closing = [asyncio.create_task(client.close()) for _ in range(2)]
        await asyncio.to_thread(deaf.recv_multipart)
        for close in closing:
            close.cancel()
        with pytest.raises(RefusedError, match=r"^disconnected"):
            await hello
        await asyncio.wait(closing)
        assert all(each.cancelled() for each in closing)


async def test_an_address_that_is_none_is_bad_input() -> None:
    lost = QueueClient("nonsense", run="run", who="lost", deadline_s=WAIT_S)
    with pytest.raises(ConfigError, match=r"queue\.address = 'nonsense': cannot be used"):
        await lost.connect()
    await lost.close()


def test_an_occupied_port_says_what_to_do() -> None:
    first = Broker("tcp://127.0.0.1:*", "run")
    with pytest.raises(ConfigError, match="another process uses this address") as error:
        Broker(first.bound_address, "run")
    assert error.value.key == "queue.address"
    with pytest.raises(ConfigError, match="cannot be bound"):
        Broker("tcp://nowhere", "run")
    first.close()


def test_the_blocking_client_works_from_a_plain_thread() -> None:
    broker = Broker("tcp://127.0.0.1:*", "run")
    with serving(broker):
        client = BlockingClient(
            QueueClient(broker.bound_address, run="run", who="learner", deadline_s=WAIT_S)
        )
        assert client.connect().streams == ()
        assert client.open("train", TRAIN).version == 0
        client.post("weights/0", {"world": 1})
        assert client.lookup("weights/0", wait_s=WAIT_S) == {"world": 1}
        with pytest.raises(RefusedError, match=r"^fenced"):
            client.trained("train", learner_epoch=7, step=0)
        client.close()
        client.close()


async def commit_damaged(worker: QueueClient, one: Lease) -> None:
    """Frames that are counted right and sealed wrong: what a bad memory or disk makes of a group."""
    payload = encode_group(group(one.task, 0))
    damaged = bytearray(payload.frames[0])
    damaged[-1] ^= 1
    request = CommitRequest(
        stream="train",
        ordinal=one.task.ordinal,
        epoch=one.epoch,
        tokens=payload.tokens,
        nbytes=payload.nbytes,
        start_version=payload.start_version,
        digest=payload.digest,
    )
    await worker._connection.request(request, [bytes(damaged)])


async def test_a_group_that_cannot_be_read_is_dropped_and_its_step_begins_anew(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", TRAIN)
    await learner.submit("train", tasks(0, 2 * B))
    first, second, *others = await lease(worker, 2 * B)
    await commit_damaged(worker, first)
    await worker.commit("train", second, group(tasks(7, 1)[0], 0))  # it says that it is of another task
    for one in others:
        await worker.commit("train", one, group(one.task, 0))
    assert await refusal(claim(learner, opened, 0)) == "abandoned"
    assert ordinals((await claim(learner, opened, 0)).groups) == [2, 3, 4, 5]
    depth = (await learner.trained("train", learner_epoch=1, step=0)).depth
    assert (depth["trained"], depth["dropped_by_reason"]) == (B, {"corrupt": 2})


async def test_a_group_that_cannot_be_read_is_not_collected(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", EVAL)
    await learner.submit("train", tasks(0, 3))
    leases = await lease(worker, 3)
    await commit_damaged(worker, leases[1])
    for one in (leases[0], leases[2]):
        await worker.commit("train", one, group(one.task, 0))
    collected = await learner.collect("train", learner_epoch=opened.learner_epoch, wait_s=WAIT_S)
    assert ordinals(collected) == [0, 2]
    assert await learner.collect("train", learner_epoch=opened.learner_epoch, wait_s=0.0) == []
    status = (await learner.status())["streams"]["train"]
    assert (status["trained"], status["dropped_by_reason"]) == (2, {"corrupt": 1})
