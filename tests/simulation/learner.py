"""The learner of a simulated run, all ranks of it, as in trainer.py and train_stream.py of asyncrl/learner.

It claims one ahead of the computation, publishes, reports, evaluates and checkpoints. It requests the first claim of
the next step while the last one is computed, and begins with it if it comes before the report is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from asyncrl.errors import RefusedError
from asyncrl.queue.protocol.replies import Claim
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.types import Task

from .parties import EVAL, PARK_S, TRAIN, Process

EVALS = StreamSettings(
    groups_per_version=1, max_staleness=None, window=None, depth=4, max_bytes=1 << 20, lease_s=10.0
)


CLAIM_S = 0.5
"""How long a claim waits in the queue: less than a message that was lost takes to be sent again."""

T = TypeVar("T")


class BegunAnew(Exception):  # noqa: N818  (a decision, not a failure)
    """The queue has taken the step apart."""


@dataclass
class Checkpoint:
    """snapshot, evals: of the two streams · steps: the ordinals of every step that the policy was trained on."""

    version: int
    snapshot: bytes
    evals: bytes | None
    steps: dict[int, list[int]] = field(default_factory=dict)


class Learner(Process):
    """All of its ranks: if one dies, they all do."""

    async def run(self) -> None:
        plan = self.world.plan
        self._ranks = [self.client(f"{self.name}.{rank}") for rank in range(plan.stream.learners)]
        for rank in self._ranks:
            await rank.connect()
        await self._restore_and_open()
        if plan.checkpoint_first:
            await self._checkpoint()
        while self.version < plan.versions and await self._step():
            pass
        await self._checkpoint()
        while self._evaluating:
            await self._poll_evaluations(PARK_S)
        self.world.wound_up(self.steps)
        await self._ranks[0].finish("done")

    async def _restore_and_open(self) -> None:
        lead, plan = self._ranks[0], self.world.plan
        saved = self.world.checkpoints[-1] if self.world.checkpoints else None
        self.version, self.steps = (saved.version, dict(saved.steps)) if saved else (0, {})
        self._evaluating: set[int] = set()
        self._ahead: list[asyncio.Task[tuple[Claim | None, str]]] = []
        self._round = 0  # requests of an earlier one are given up
        self._before: dict[int, asyncio.Task[Any]] = {}  # the last request of each rank
        self._report: asyncio.Task[None] | None = None
        self._pristine: bytes | None = None
        if plan.evaluations:
            self._evals = (await lead.open(EVAL, EVALS, saved.evals if saved else None)).learner_epoch
        opened = await lead.open(TRAIN, plan.stream, saved.snapshot if saved else None)
        if plan.evaluations:
            self._pristine = await lead.snapshot(EVAL, learner_epoch=self._evals)
        assert opened.version == self.version
        self._epoch, self._lineage = opened.learner_epoch, opened.lineage
        for rank, client in enumerate(self._ranks):
            await client.post(f"weights/{rank}", {"lineage": self._lineage})
        self.world.publish((self._lineage, self.version))

    async def _step(self) -> bool:
        """Whether there may be another one."""
        lead, plan, rng = self._ranks[0], self.world.plan, self.world.rng
        try:
            ordinals = await self._train()
        except BegunAnew:
            self._forget_ahead()
            return True
        except RefusedError as refusal:
            if refusal.reason == "exhausted":
                return False
            raise
        if rng.random() < plan.refused:
            self._forget_ahead()
            await lead.reject(TRAIN, learner_epoch=self._epoch, step=self.version, reason="not_finite")
            return True
        self.world.publish((self._lineage, self.version + 1))
        self._report = self._begin(self._trained(self.version, rng.random() * 0.3))
        self.steps[self.version] = ordinals
        self.version += 1
        if plan.evaluations:
            await self._evaluate()
        if self.version % plan.checkpoint_every == 0:
            await self._checkpoint()
        return True

    def _forget_ahead(self) -> None:
        self._ahead, self._round = [], self._round + 1

    async def _trained(self, step: int, waited: float) -> None:
        at = {"learner_epoch": self._epoch, "step": step}
        assert (await self._ranks[0].trained(TRAIN, **at, waited=waited)).version == step + 1

    async def _reported(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            await report

    async def _checkpoint(self) -> None:
        lead, saved = self._ranks[0], self.world.checkpoints
        await self._reported()
        if saved and saved[-1].version == self.version:
            return
        snapshot = await lead.snapshot(TRAIN, learner_epoch=self._epoch)
        await asyncio.sleep(self.world.plan.step_s)
        self.world.checkpoints.append(Checkpoint(self.version, snapshot, self._pristine, dict(self.steps)))
        await lead.checkpointed(TRAIN, learner_epoch=self._epoch, version=self.version)

    # ------------------------------------------------------------------ claims

    async def _train(self) -> list[int]:
        """The ordinals of the running step, of all ranks."""
        ordinals: list[int] = []
        index, last = 0, False
        attempt: int | None = None
        ahead = self._ahead
        self._forget_ahead()
        asked = ahead or self._ask(index, attempt)
        while not last:
            claims = await self._agreed(asked, index, attempt)
            last, index, attempt = claims[0].last, index + 1, claims[0].attempt
            again: list[asyncio.Task[str]] = []
            if any(claim.ahead for claim in claims):
                again = [
                    self._in_turn(rank, partial(self._again, rank, claim))
                    for rank, claim in enumerate(claims)
                ]
            if not last:
                asked = self._ask(index, attempt)
            elif self.version + 1 < self.world.plan.versions:
                self._ahead = [
                    self._in_turn(rank, partial(self._claim_ahead, rank, self.version + 1, self._round))
                    for rank in range(len(self._ranks))
                ]
            for claim in claims:
                for group in claim.groups:
                    self.world.history.check_received(group)
                    ordinals.append(group.task.ordinal)
            await asyncio.sleep(self.world.plan.step_s * self.world.rng.random())
            if any([await task for task in again]):
                raise BegunAnew
            await self._reported()
        return ordinals

    def _ask(self, index: int, attempt: int | None) -> list[asyncio.Task[tuple[Claim | None, str]]]:
        return [
            self._in_turn(rank, partial(self._claim, rank, self.version, index, attempt))
            for rank in range(len(self._ranks))
        ]

    def _in_turn(self, rank: int, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Each rank makes one request after the other, as in its claims thread."""

        async def behind(before: asyncio.Task[Any] | None) -> T:
            if before is not None:
                await asyncio.wait([before])
            return await work()

        task = self._begin(behind(self._before.get(rank)))
        self._before[rank] = task
        return task

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.world.loop.create_task(work)
        self._tasks.append(task)  # type: ignore[arg-type]
        task.add_done_callback(self._tasks.remove)  # type: ignore[arg-type]
        return task

    async def _claim_ahead(self, rank: int, step: int, round_: int) -> tuple[Claim | None, str]:
        """None once the learner waits for a claim, or begins anew."""
        while True:
            claim, refusal = await self._claim(rank, step, 0, None, ahead=True)
            if refusal == "abandoned":
                return None, ""
            if claim is not None or refusal or self._round != round_:
                return claim, refusal

    async def _again(self, rank: int, claim: Claim) -> str:
        """Why it does not stand; empty: it does."""
        mine, round_, step = [group.task.ordinal for group in claim.groups], self._round, self.version
        while self._round == round_:
            again, refusal = await self._claim(rank, step, 0, claim.attempt, received=len(mine))
            if again is not None:
                return "" if list(again.ordinals) == mine else "abandoned"
            if refusal:
                return refusal
        return ""

    async def _claim(
        self, rank: int, step: int, index: int, attempt: int | None, received: int = 0, ahead: bool = False
    ) -> tuple[Claim | None, str]:
        """(the claim if there is one, why there will be none)."""
        plan = self.world.plan
        where = {"learner_epoch": self._epoch, "step": step}
        try:
            claim = await self._ranks[rank].claim(
                TRAIN,
                **where,
                index=index,
                rank=rank,
                max_tokens=plan.max_tokens,
                whole=plan.whole,
                wait_s=CLAIM_S,
                attempt=attempt,
                received=received,
                ahead=ahead,
            )
            unreadable = [] if claim is None else [g.task.ordinal for g in claim.groups]
            unreadable = [ordinal for ordinal in unreadable if ordinal in plan.corrupt]
            if claim is None or not unreadable:
                return claim, ""
            if claim.ahead:
                return None, "abandoned"
            # As the client does with what it cannot decode.
            at = {**where, "attempt": claim.attempt}
            await self._ranks[rank].abandon(TRAIN, **at, dropped=unreadable, reason="corrupt")
            return None, "abandoned"
        except RefusedError as refusal:
            if refusal.reason not in ("exhausted", "abandoned"):
                raise
            return None, refusal.reason

    async def _agreed(
        self, asked: Sequence[asyncio.Task[tuple[Claim | None, str]]], index: int, attempt: int | None
    ) -> list[Claim]:
        """Every rank's claim, once all of them have theirs."""
        answers = [await task for task in asked]
        while True:
            claims = [claim for claim, _ in answers if claim is not None]
            refusals = {why for _, why in answers}
            if "abandoned" in refusals or len({claim.attempt for claim in claims}) > 1:
                raise BegunAnew
            if len(claims) == len(self._ranks):
                return claims
            if "exhausted" in refusals:
                raise RefusedError("exhausted")
            again = {
                rank: self._in_turn(rank, partial(self._claim, rank, self.version, index, attempt))
                for rank, (claim, _) in enumerate(answers)
                if claim is None
            }
            for rank, task in again.items():
                answers[rank] = await task

    # ------------------------------------------------------------------ evaluations

    async def _evaluate(self) -> None:
        lead = self._ranks[0]
        ordinal, room = await lead.room(EVAL, wait_s=0.0)
        if room > 0:
            await lead.submit(EVAL, [Task(ordinal, "", {"version": self.version})], min_version=self.version)
            self._evaluating.add(ordinal)
        await self._poll_evaluations(0.0)

    async def _poll_evaluations(self, wait_s: float) -> None:
        for group in await self._ranks[0].collect(EVAL, learner_epoch=self._evals, wait_s=wait_s):
            assert group.start_version >= group.task.data["version"]
            # Twice, if the broker has lost it after the first time.
            self._evaluating.discard(group.task.ordinal)
