"""What a generator does where a version that comes by vLLM's own weight transfer does not come whole."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.generator import weights
from asyncrl.generator.engines.receiver import Learner, LostWeightsError
from asyncrl.generator.engines.vllm import vllm_broadcast
from asyncrl.generator.engines.vllm.vllm_broadcast import MOST_LOST, BroadcastReceiver
from asyncrl.sync.broadcast.stream import Offer


class OneEngine:
    """An engine and its learner. receives: what its ranks do · pauses: of its flips"""

    def __init__(self, receives: Callable[..., Awaitable[Any]], deadline_s: float = 60.0) -> None:
        self.pauses = 0
        self.learner_end: socket.socket | None = None
        self._receives = receives
        sync = SyncConfig(backend="vllm", verify=False, deadline_s=deadline_s)
        reader: Any = SimpleNamespace(who="generator-0", sync=sync, open=lambda *_: self)
        self.receiver = BroadcastReceiver(reader, 2, receives, self._flip)

    def turn(self, version: int, ranks: int) -> Offer:
        joined, self.learner_end = socket.socketpair()
        return Offer(joined, bytes(128), 64, [("a", "bfloat16", [2, 3]), ("b", "float32", [5])])

    def newest(self, newer_than: int, wait_s: float) -> int:
        return newer_than + 1

    def held(self, version: int) -> None: ...

    def close(self) -> None: ...

    async def _flip(self, version: int, install: Callable[[], Awaitable[None]]) -> float:
        self.pauses += 1
        await install()
        return 0.25


async def test_an_update_that_fails_leaves_no_version_and_the_third_in_a_row_is_a_fault() -> None:
    fails = True

    async def receives(method: str, group: dict[str, Any], params: dict[str, Any]) -> None:
        assert method == "asyncrl_receive"
        assert group == {
            "rank_offset": 1,
            "world_size": 3,
            "nccl_unique_id_b64": base64.b64encode(bytes(128)).decode(),
            "packed": True,
            "packed_buffer_size_bytes": 64,
            "packed_num_buffers": 2,
        }
        assert params == {
            "names": ("a", "b"),
            "dtype_names": ("bfloat16", "float32"),
            "shapes": ([2, 3], [5]),
        }
        if fails:
            raise WeightSyncError("rank 1: connection reset")

    engine = OneEngine(receives)
    await engine.receiver.open(Learner((), 0))
    for failures in (
        MOST_LOST - 1,
        MOST_LOST - 1,
        MOST_LOST,
    ):  # a version that comes whole begins the count anew
        fails = True
        for failure in range(1, failures + 1):
            staged = await engine.receiver.stage(7)
            assert staged.bytes == 2 * (12 + 20), "to two ranks"
            error = LostWeightsError if failure < MOST_LOST else WeightSyncError
            with pytest.raises(error, match=r"rank 1: connection reset"):
                await engine.receiver.flip(7)
            assert engine.learner_end is not None
            assert engine.learner_end.recv(1) == b"", "the turn has ended"
        fails = False
        await engine.receiver.stage(8)
        assert await engine.receiver.flip(8) == 0.25
    await engine.receiver.close()


async def test_ranks_that_do_not_come_back_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receives(*_: Any) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(vllm_broadcast, "GRACE_S", 0.0)
    engine = OneEngine(receives, deadline_s=0.05)
    await engine.receiver.open(Learner((), 0))
    await engine.receiver.stage(7)
    with pytest.raises(
        DeadlineError, match=r"generator-0 waited .* for its ranks: version 7 of learner rank 0"
    ):
        await engine.receiver.flip(7)
    await engine.receiver.close()


async def test_an_engine_that_waits_for_its_next_turn_or_leaves_has_ended_its_last_one() -> None:
    async def receives(*_: Any) -> None: ...

    class InTurn(OneEngine):
        def turn(self, version: int, ranks: int) -> Offer:
            self.check_ended()
            return super().turn(version, ranks)

        def check_ended(self) -> None:
            if self.learner_end is not None:
                self.learner_end.setblocking(False)
                assert self.learner_end.recv(1) == b""

    engine = InTurn(receives)
    await engine.receiver.open(Learner((), 0))
    await engine.receiver.stage(7)
    await engine.receiver.stage(8)
    await engine.receiver.open(Learner((), 1))
    engine.check_ended()
    await engine.receiver.close()


async def test_an_offer_is_taken_only_when_the_flip_can_begin_and_one_that_has_ended_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def receives(*_: Any) -> None: ...

    monkeypatch.setattr(weights, "POLL_S", 0.0)
    engine = OneEngine(receives)
    follower = weights.WeightFollower("generator-0", engine.receiver, engine)  # type: ignore[arg-type]
    follower.held, follower.lineage = 0, 0
    learner = Learner((), 0)
    await engine.receiver.open(learner)
    async with follower.pinned():
        assert await follower._stage_newest(0) is None
        assert engine.learner_end is None, "an evaluation pins the version, and other engines get their turns"

    staged = await follower._stage_newest(0)
    assert staged is not None
    assert engine.learner_end is not None
    engine.learner_end.close()
    assert not await follower._install(staged, learner)
    assert (engine.pauses, follower.held, follower.flipping) == (0, 0, False)

    staged = await follower._stage_newest(0)
    assert staged is not None
    assert await follower._install(staged, learner)
    assert (engine.pauses, follower.held, follower.flipping) == (1, 1, False)
    await engine.receiver.close()
