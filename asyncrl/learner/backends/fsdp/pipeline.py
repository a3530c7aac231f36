"""Passes through all pipeline stages of one network. Every rank computes its own stages.

    1f1b, 2 ranks             rank 0   F0 F1 B0 F2 B1 F3 B2 B3        stage 0
                              rank 1      F0 B0 F1 B1 F2 B2 F3 B3     stage 1

    interleaved, 2 per rank   rank 0   stages 0 and 2                 a smaller bubble, more messages
                              rank 1   stages 1 and 3

Micro-batches have different lengths, but all messages of one schedule have the same: between two stages they are padded
with rows that no stage computes on.

Axes:  N packed tokens · S rows of them between two stages · W rows of a message, padding included · D hidden size · V
vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from asyncrl.learner.algorithms.roles import Loss
from asyncrl.learner.backends.fsdp.stages import ModelStage, ModelStages
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.documents import Documents

WIDTH_STEP: Final = 256
"""W is a multiple of it, so that one schedule serves micro-batches of about the same length."""


def turns_of(batches: int, ranks: int, kind: str) -> int:
    """The number of micro-batches in a schedule for `batches` of them: at least one for each rank, and for an
    interleaved schedule a multiple of the ranks.

    >>> [turns_of(n, 4, "1f1b") for n in (1, 4, 5)], [turns_of(n, 4, "interleaved") for n in (1, 4, 5)]
    ([4, 4, 5], [4, 4, 8])
    """
    return max(batches, ranks) if kind == "1f1b" else -(-batches // ranks) * ranks


class Pipeline:
    """Runs micro-batches through the stages of one network.

    stages     those of this rank, sharded already
    kind       `learner.parallel.pipeline_schedule`
    group      the ranks of the pipeline, first to last
    documents  makes the documents of a micro-batch on the CPU
    """

    def __init__(
        self,
        stages: ModelStages,
        kind: str,
        group: dist.ProcessGroup,
        device: torch.device,
        documents: Callable[[MicroBatch], Documents],
    ) -> None:
        self._documents = documents
        self._stages, self._kind, self._group, self._device = stages.parts, kind, group, device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        body = stages.network.body
        text = body.config.get_text_config()
        self._hidden, self._vocabulary, self._dtype = text.hidden_size, text.vocab_size, body.dtype
        self._outputs, self._width = stages.network.outputs, stages.network.width
        self._made: tuple[tuple[int, int], Any] | None = None
        self._here: list[MicroBatch] = []
        self._loss: Loss | None = None

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Collective: forward, loss and backward of each batch, see `Model.accumulate`."""
        if not batches:
            return
        self._here, self._loss = [batch.to(self._device) for batch in batches], loss
        turns = turns_of(len(batches), self._ranks, self._kind)
        fillers = [MicroBatch.empty()] * (turns - len(batches))
        here = [*self._here, *(filler.to(self._device) for filler in fillers)]
        documents = map(self._documents, [*batches, *fillers])
        expected = list(zip(here, documents, strict=True))
        rows = max(self._stages[0].rows(documents) for _, documents in expected)
        width = -(-rows // WIDTH_STEP) * WIDTH_STEP
        for stage in self._stages:
            stage.expect(expected, width)
        schedule = self._schedule(turns, width)
        numbers = torch.arange(turns)  # the schedule hands them out one by one
        begin = (numbers,) if self._stages[0].first else ()
        target = numbers if self._stages[-1].last else None
        with _gradients_aside(self._stages):
            schedule.step(*begin, target=target, return_outputs=False)
        self._here, self._loss = [], None

    @torch.no_grad()
    def predict(self, batch: MicroBatch, following: bool = False) -> Tensor:
        """Collective: the network's first output for one batch, float32 on the CPU of every rank."""
        here = batch.to(self._device)
        shape = (batch.rollouts, self._vocabulary) if following else (batch.tokens, *self._width)
        output = torch.empty(shape, device=self._device)
        documents = self._documents(batch)
        for stage in self._stages:
            rows = stage.rows(documents)
            stage.expect([(here, documents)], rows, following)
            state_SD = torch.empty((rows, self._hidden), dtype=self._dtype, device=self._device)
            if not stage.first:
                dist.recv(state_SD, group=self._group, group_src=(self._rank - 1) % self._ranks)
            out = stage(state_SD)
            if stage.last:
                output = out[0].float().contiguous()
            else:
                dist.send(out, group=self._group, group_dst=(self._rank + 1) % self._ranks)
            reshard(stage)
        dist.broadcast(output, group=self._group, group_src=self._ranks - 1)
        return output.cpu()

    def _schedule(self, turns: int, width: int) -> Any:
        """The last schedule if it has these sizes, which its buffers have, else a new one."""
        if self._made is None or self._made[0] != (turns, width):
            self._made = None  # frees its buffers before others are allocated
            stages: list[Any] = [self._runner(stage, width) for stage in self._stages]
            settings: dict[str, Any] = {"loss_fn": self._loss_of_turn, "scale_grads": False}
            if self._kind == "1f1b":
                schedule: Any = Schedule1F1B(stages[0], turns, **settings)
            else:
                schedule = ScheduleInterleaved1F1B(stages, turns, **settings)
            self._made = (turns, width), schedule
        return self._made[1]

    def _runner(self, stage: ModelStage, width: int) -> PipelineStage:
        """A stage with its sizes given, so that torch does not run it to find them."""
        number = torch.empty(1, dtype=torch.int64, device="meta")
        hidden = torch.empty((width, self._hidden), dtype=self._dtype, device="meta", requires_grad=True)
        # The outputs of the last stage are not sent: only their number must be right.
        outputs = (hidden,) * self._outputs
        return PipelineStage(
            stage,
            stage.index,
            stage.stages,
            self._device,
            input_args=number if stage.first else hidden,
            output_args=outputs if stage.last else hidden,
            group=self._group,
        )

    def _loss_of_turn(self, outputs: tuple[Tensor, ...], number: Tensor) -> Tensor:
        turn = int(number)
        if turn >= len(self._here) or self._loss is None:  # a filler
            return sum((output.sum() for output in outputs), start=torch.zeros((), device=self._device)) * 0
        return self._loss(self._here[turn], *outputs)


@contextmanager
def _gradients_aside(stages: Sequence[ModelStage]) -> Iterator[None]:
    """Set accumulated gradients aside and add them afterwards: the first step of a schedule drops those that it
    finds."""
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, grad in zip(parameters, before, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)


def reshard(network: nn.Module) -> None:
    """Shard the parameters again that stay whole until their backward. After a prediction none comes, and the next
    forward would compute with old weights."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
