"""The token table on two pipeline stages: both step on the sum of both gradients, which counts once. The stages are
threads here; `test_pipeline.py` has processes."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.learner.backends.fsdp import masters as holder
from asyncrl.learner.backends.fsdp.masters import TiedEmbedding


@dataclass
class Stage:
    """One end: its number, its table, and what holds the table."""

    rank: int
    master: Tensor
    table: TiedEmbedding

    def add(self, gradient: list[float]) -> None:
        """As a backward pass does."""
        new, old = torch.tensor(gradient), self.master.grad
        self.master.grad = new if old is None else old + new

    @property
    def gradient(self) -> list[float] | None:
        return None if self.master.grad is None else self.master.grad.tolist()


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> tuple[Stage, Stage]:
    """The first and the last stage; a group is the number of its rank here."""
    boxes: list[queue.Queue[Tensor]] = [queue.Queue(), queue.Queue()]

    def send(tensor: Tensor, group: int, group_dst: int) -> None:
        boxes[group_dst].put(tensor.clone())

    def recv(tensor: Tensor, group: int, group_src: int) -> None:
        tensor.copy_(boxes[group].get(timeout=10))

    names: dict[str, Any] = {"get_rank": lambda group: group, "get_world_size": lambda group: 2}
    monkeypatch.setattr(holder, "dist", SimpleNamespace(send=send, recv=recv, **names))
    masters = [torch.zeros(2), torch.zeros(2)]
    first, last = (Stage(rank, master, TiedEmbedding(master, rank)) for rank, master in enumerate(masters))  # type: ignore[arg-type]
    return first, last


def join(*stages: Stage) -> None:
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(stage.table.join) for stage in stages]:
            done.result(10)


def test_both_stages_have_the_sum_however_often_it_is_asked_for(stages: tuple[Stage, Stage]) -> None:
    first, last = stages
    first.add([1.0, 2.0])
    last.add([10.0, 20.0])
    join(*stages)
    join(*stages)
    assert first.gradient == last.gradient == [11.0, 22.0]
    assert first.table.repeated is None
    assert last.table.repeated is last.master.grad


def test_what_was_joined_counts_once_when_more_gradient_comes(stages: tuple[Stage, Stage]) -> None:
    """As where the norm of a gradient is asked for, and then another micro-batch is added."""
    first, last = stages
    first.add([1.0, 2.0])
    last.add([10.0, 20.0])
    join(*stages)
    for stage in stages:
        stage.table.begin()
    assert (first.gradient, last.gradient) == ([11.0, 22.0], None)
    first.add([0.5, 0.5])
    last.add([100.0, 200.0])
    join(*stages)
    assert first.gradient == last.gradient == [111.5, 222.5]


def test_without_a_gradient_nothing_is_sent(stages: tuple[Stage, Stage]) -> None:
    join(*stages)
    assert [stage.gradient for stage in stages] == [None, None]
