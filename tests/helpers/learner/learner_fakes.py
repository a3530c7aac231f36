"""A backend of bigram models in float64: exact enough to tell one way of summing gradients from another.

    ranks(2, work)    work(backend) in two threads at once, each with its own shard of nothing: every rank holds the
                      whole model, and `optimizer_step` sums the gradients of all data ranks

A bigram model says log π(token | token before it) = log softmax(table[before])[token], a critic says table[before].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from asyncrl.learner.algorithms.roles import Loss
from asyncrl.learner.data.batch import MicroBatch

VOCABULARY = 33
Result = TypeVar("Result")


class Meeting:
    """Where ranks that are threads hand values to one another."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._barrier = threading.Barrier(world, timeout=30)
        self._slots: list[Any] = [None] * world

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        every = list(self._slots)
        self._barrier.wait()
        return every

    def leave(self) -> None:
        self._barrier.abort()


class Bigram:
    """`Model`, and what the policy is made of. `gradients`: of each optimizer step, summed over ranks and scaled."""

    def __init__(self, seed: int, gather: Callable[[Tensor], list[Tensor]], critic: bool = False) -> None:
        random = torch.Generator().manual_seed(seed)
        size = (VOCABULARY,) if critic else (VOCABULARY, VOCABULARY)
        self.table = torch.randn(size, generator=random, dtype=torch.float64).requires_grad_()
        self._gather, self._critic = gather, critic
        self.gradients: list[Tensor] = []
        self.passes = 0

    def says(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(log-probs or values, entropies), [N] float64, 0 outside the mask."""
        before_N = torch.cat([batch.token_ids_N[:1], batch.token_ids_N[:-1]])
        if self._critic:
            said_N, entropy_N = self.table[before_N], torch.zeros(batch.tokens)
        else:
            temperature_N = batch.temperature_R[batch.seq_N]
            logp_NV = (self.table[before_N] / temperature_N[:, None]).log_softmax(-1)
            said_N = logp_NV.gather(1, batch.token_ids_N[:, None])[:, 0]
            entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
        return said_N * batch.loss_mask_N, entropy_N * batch.loss_mask_N

    def predict(self, batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self.says(batch)[0].float()

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        for batch in batches:
            self.passes += 1
            said = self.says(batch)
            loss(batch, *(said[:1] if self._critic else said)).backward()

    def gradient_norm(self, scale: float) -> float:
        return float(self._gradient(scale).norm())

    def _gradient(self, scale: float) -> Tensor:
        mine = torch.zeros_like(self.table) if self.table.grad is None else self.table.grad
        return scale * torch.stack(self._gather(mine)).sum(0)

    def optimizer_step(self, scale: float, lr: float) -> float:
        gradient = self._gradient(scale)
        self.forget_gradients()
        norm = float(gradient.norm())
        if norm == norm:
            self.gradients.append(gradient)
            with torch.no_grad():
                self.table -= lr * gradient
        return norm

    def forget_gradients(self) -> None:
        self.table.grad = None


class FakeBackend:
    """`Backend` without layouts, checkpoints and devices. sharing: ranks that have the same rows"""

    def __init__(
        self, models: Iterable[str] = (), rank: int = 0, meeting: Meeting | None = None, sharing: int = 1
    ) -> None:
        self.rank, self._meeting = rank, meeting or Meeting(1)
        self.world, self._sharing = self._meeting.world, sharing
        self.data_rank, self.data_world = rank // sharing, self.world // sharing
        self.is_data_leader = rank % sharing == sharing - 1
        self.policy = Bigram(0, self.gather)
        names = ("critic", "cost_critic", "reference", "reward_model", "teacher")
        self._models = {
            name: Bigram(seed, self.gather, critic=name.endswith("critic"))
            for seed, name in enumerate(names, start=1)
            if name in set(models)
        }
        for model in self._models.values():
            model.copy_from_policy = self._copier(model)  # type: ignore[attr-defined]

    @property
    def models(self) -> Mapping[str, Bigram]:
        return self._models

    def exchange(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)

    def gather(self, mine: Tensor) -> list[Tensor]:
        every = self.exchange(mine)
        return [each.clone() for each in every[self._sharing - 1 :: self._sharing]]

    def _copier(self, model: Bigram) -> Callable[[], None]:
        def copy() -> None:
            with torch.no_grad():
                model.table.copy_(self.policy.table)

        return copy


def ranks(
    world: int, work: Callable[[FakeBackend], Result], models: Iterable[str] = (), sharing: int = 1
) -> list[Result]:
    """What `work` returns on each rank, in rank order."""
    meeting = Meeting(world)

    def rank(number: int) -> Result:
        try:
            return work(FakeBackend(models, number, meeting, sharing))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(world) as threads:
        running = [threads.submit(rank, number) for number in range(world)]
    failures = [error for done in running if (error := done.exception()) is not None]
    if failures:
        raise next((e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0])
    return [done.result() for done in running]
