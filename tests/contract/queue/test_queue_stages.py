"""Columns and stages, finished turns, steps begun anew, the drain: over a real broker, and without sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from queue_cases import LEASE_S, WAIT_S, AnyQueue, B, claim, group, lease, ordinals, parked, refusal, tasks

from asyncrl.errors import DeadlineError
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.protocol.replies import StageLease
from asyncrl.queue.protocol.requests import StageDropRequest
from asyncrl.queue.protocol.settings import StageSettings, StreamSettings
from asyncrl.types import NO_VERSION

STAGED = StreamSettings(
    groups_per_version=B,
    max_staleness=1,
    window=1,
    depth=2 * B,
    max_bytes=1 << 30,
    lease_s=LEASE_S,
    columns=("rewards", "values"),
    stages=(
        StageSettings("reward", adds=("rewards",)),
        StageSettings("critic", needs=("rewards",), adds=("values",)),
    ),
)
PLAIN = StreamSettings(B, 1, 1, 2 * B, 1 << 30, LEASE_S)


async def staged(client: QueueClient, stage: str, most: int = B) -> list[StageLease]:
    return await client.stage_lease("train", stage, most=most, wait_s=WAIT_S)


async def test_a_group_passes_its_stages_before_it_is_claimed(queue: AnyQueue) -> None:
    learner, worker, scorer, critic = [
        await queue.client(who) for who in ("learner", "worker", "reward", "critic")
    ]
    opened = await learner.open("train", STAGED)
    await learner.submit("train", tasks(0, B))
    waiting = asyncio.create_task(staged(scorer, "reward"))
    await parked(queue, 1)
    first, *others = await lease(worker, B)
    await worker.commit("train", first, group(first.task, 0), columns=())
    (one,) = await waiting
    assert (one.task, one.stamps, one.group.token_ids.tolist()) == (first.task, {}, [0] * 12)
    for other in others:
        await worker.commit("train", other, group(other.task, 0), columns=())
    for scored in [one, *await staged(scorer, "reward")]:
        reward = np.array([scored.task.ordinal, -1.0], np.float32)
        await scorer.stage_commit("train", scored, {"rewards": reward})
    for valued in await staged(critic, "critic"):
        assert valued.group.rewards.tolist() == [valued.task.ordinal, -1.0]
        assert valued.stamps == {"reward": NO_VERSION}
        await critic.stage_commit("train", valued, {"values": np.arange(12, dtype=np.float32)}, version=5)
    claimed = await claim(learner, opened, 0)
    assert [one.rewards.tolist() for one in claimed.groups] == [[o, -1.0] for o in range(B)]
    assert claimed.groups[3].columns["values"].tolist() == list(range(12))
    assert claimed.stamps[3] == {"reward": NO_VERSION, "critic": 5}


async def test_stage_leases_are_renewed_given_back_expire_and_are_fenced(queue: AnyQueue) -> None:
    learner, worker, scorer = [await queue.client(who) for who in ("learner", "worker", "scorer")]
    await learner.open("train", STAGED)
    await learner.submit("train", tasks(0, 3))
    for one in await lease(worker, 3):
        await worker.commit("train", one, group(one.task, 0), columns=())
    assert await refusal(staged(scorer, "judge")) == "unknown_stage"
    kept, returned, dropped = await staged(scorer, "reward")
    await scorer.give_back("train", [returned])
    await scorer.stage_drop("train", dropped, "unscored")
    queue.clock.now = LEASE_S - 1
    assert (await scorer.renew()).lost == []
    queue.clock.now = LEASE_S + 1
    assert ordinals(await staged(scorer, "reward")) == [1]
    queue.clock.now = 3 * LEASE_S
    assert ordinals(await staged(await queue.client("other"), "reward")) == [0, 1]
    late = scorer.stage_commit("train", kept, {"rewards": np.zeros(2, np.float32)})
    assert await refusal(late) == "fenced"
    status = (await learner.status())["streams"]["train"]
    assert status["dropped_by_reason"] == {"unscored": 1}
    assert status["stages"]["reward"] == {"waiting": 0, "leased": 2}


async def test_a_column_of_a_wrong_length_is_found_by_whoever_gets_it_and_the_group_dropped(
    queue: AnyQueue,
) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    await learner.open("train", STAGED)
    await learner.submit("train", tasks(0, 1))
    (one,) = await lease(worker, 1)
    await worker.commit("train", one, group(one.task, 0), columns=())
    (scored,) = await staged(worker, "reward")
    await worker.stage_commit("train", scored, {"rewards": np.zeros(3, np.float32)})
    assert await staged(worker, "critic") == []
    assert (await learner.status())["streams"]["train"]["dropped_by_reason"] == {"corrupt": 1}


async def one_broken_one_whole(queue: AnyQueue) -> QueueClient:
    """The groups 0, which cannot be read, and 1 wait for the critic. Returns a client to take them."""
    learner, worker = await queue.client("learner"), await queue.client("worker")
    await learner.open("train", STAGED)
    await learner.submit("train", tasks(0, 2))
    for one in await lease(worker, 2):
        await worker.commit("train", one, group(one.task, 0), columns=())
    for values, scored in zip((3, 2), await staged(worker, "reward"), strict=True):
        await worker.stage_commit("train", scored, {"rewards": np.zeros(values, np.float32)})
    return await queue.client("critic")


async def test_leases_are_renewed_while_a_broken_group_beside_them_is_dropped(
    queue: AnyQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drop takes longer than a lease, and the client's heartbeat goes on."""
    critic = await one_broken_one_whole(queue)
    send = critic._value

    async def slow(request: Any) -> Any:
        if isinstance(request, StageDropRequest):
            for now in (LEASE_S - 1, LEASE_S + 1):
                queue.clock.now = now
                await critic.renew()
        return await send(request)

    monkeypatch.setattr(critic, "_value", slow)
    (whole,) = await staged(critic, "critic")
    await critic.stage_commit("train", whole, {"values": np.zeros(12, np.float32)})
    assert (await critic.status())["streams"]["train"]["dropped_by_reason"] == {"corrupt": 1}


async def test_leases_that_nobody_gets_are_given_back(
    queue: AnyQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken group cannot be dropped in time: the caller gets an error, and another client both groups."""
    critic = await one_broken_one_whole(queue)
    send = critic._value

    async def late(request: Any) -> Any:
        if isinstance(request, StageDropRequest):
            raise DeadlineError("critic", "the queue", "an answer to 'stage_drop'", 1.0)
        return await send(request)

    monkeypatch.setattr(critic, "_value", late)
    with pytest.raises(DeadlineError):
        await staged(critic, "critic")
    assert critic._leases["train"] == set()
    assert ordinals(await staged(await queue.client("other"), "critic")) == [1]
    assert (await critic.status())["streams"]["train"]["dropped_by_reason"] == {"corrupt": 1}


async def test_finished_turns_go_to_whoever_leases_the_task_next(queue: AnyQueue) -> None:
    learner, dying, heir = [await queue.client(who) for who in ("learner", "dying", "heir")]
    opened = await learner.open("train", PLAIN)
    await learner.submit("train", tasks(0, B))
    one, *_ = await lease(dying, B)
    assert one.progress == ()
    await dying.progress("train", one, [b"turn 1"])
    await dying.progress("train", one, [b"turn 1", b"turn 2"])
    queue.clock.now = LEASE_S + 1
    again, *others = await lease(heir, B)
    assert (again.progress, others[0].progress) == ((b"turn 1", b"turn 2"), ())
    assert await refusal(dying.progress("train", one, [b"turn 3"])) == "fenced"
    for lease_ in [again, *others]:
        await heir.commit("train", lease_, group(lease_.task, 0))
    assert ordinals((await claim(learner, opened, 0)).groups) == [0, 1, 2, 3]
    assert (await learner.trained("train", learner_epoch=1, step=0)).depth["bytes"] == 0


async def test_a_step_that_is_begun_anew_leaves_the_broken_group_out(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", PLAIN)
    await learner.submit("train", tasks(0, 2 * B))
    for one in await lease(worker, 2 * B):
        await worker.commit("train", one, group(one.task, 0))
    claimed = await claim(learner, opened, 0)
    broken = {"learner_epoch": 1, "step": 0, "attempt": claimed.attempt, "dropped": [1], "reason": "corrupt"}
    attempt = await learner.abandon("train", **broken)
    assert await learner.abandon("train", **broken) == attempt == claimed.attempt + 1
    late = {
        "learner_epoch": 1,
        "step": 0,
        "index": 1,
        "rank": 0,
        "max_tokens": 9,
        "whole": True,
        "wait_s": 0.0,
    }
    assert await refusal(learner.claim("train", **late, attempt=claimed.attempt)) == "abandoned"
    assert ordinals((await claim(learner, opened, 0)).groups) == [0, 2, 3, 4]
    depth = (await learner.trained("train", learner_epoch=1, step=0)).depth
    assert (depth["trained"], depth["dropped_by_reason"]) == (B, {"corrupt": 1})


async def test_a_drain_finishes_what_is_under_way_and_ends_the_stream(queue: AnyQueue) -> None:
    learner, worker = await queue.client("learner"), await queue.client("worker")
    opened = await learner.open("train", PLAIN)
    await learner.submit("train", tasks(0, 2 * B))
    first, second, third = await lease(worker, 3)
    assert await learner.drain("train") == 2 * B - 3
    assert await learner.drain("train") == 0
    assert await learner.room("train", wait_s=0.0) == (2 * B, 0)
    await worker.give_back("train", [third])  # nobody may begin it again
    for one in (first, second):
        await worker.commit("train", one, group(one.task, 0))
    claimed = await claim(learner, opened, 0)
    assert (ordinals(claimed.groups), claimed.last) == ([0, 1], True)
    depth = (await learner.trained("train", learner_epoch=1, step=0)).depth
    assert depth["dropped_by_reason"] == {"drained": 2 * B - 2}
    assert await refusal(claim(learner, opened, 1)) == "exhausted"
