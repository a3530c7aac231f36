"""python -m bench.learner.passes: forward and backward of rollouts, packed as asyncrl does it and padded as is usual.

Packed with each group's prompt once, and with all prompts. All ways say the log-prob of every answer token; the packed
ones say entropies too. Padded: batches of 8 in the order they come, padded on the right to the longest of the batch,
torch's attention with a mask, the head on answers only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.schema import Config
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import bins, pack_micro_batches
from asyncrl.learner.reporting.utilization import TrainingFlops
from asyncrl.models.loading import load_causal_lm
from bench.learner.model import config_of, groups_of
from bench.learner.rollouts import PROMPT, samples
from bench.process import CLOCKS, Talk

AT_ONCE = 8
"""Rollouts of a padded batch."""


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    said = talk.hears()
    config, clock = config_of(Path(said["folder"])), CLOCKS[said["clock"]]
    rollouts = {
        kind: MicroBatch.of(groups_of(samples(kind, groups, said["scale"])))
        for kind, groups in said["groups"].items()
    }
    ways: dict[str, Packed | Padded] = {
        "packed": Packed(config),
        "every_prompt": Packed(with_every_prompt(config)),
        "padded": Padded(config),
    }
    talk.tell("ready")
    while (order := talk.hears()) is not None:
        way, batch = ways[order["way"]], rollouts[order["kind"]]
        way.prepare(batch, PROMPT[order["kind"]])
        begun = clock()
        loss = way.run()
        talk.tell({"seconds": clock() - begun, "loss": loss})


def with_every_prompt(config: Config) -> Config:
    return replace(config, learner=replace(config.learner, share_prompts=False))


class Packed:
    def __init__(self, config: Config) -> None:
        self._backend, self._tokens = FsdpBackend(config), config.learner.micro_batch_tokens
        self._even, self._shares = TrainingFlops.of(config.model).even_tokens, config.learner.shares

    def prepare(self, batch: MicroBatch, prompt: int) -> None:
        self._backend.policy.forget_gradients()
        self._batch = batch

    def run(self) -> float:
        losses: list[float] = []

        def loss(_: MicroBatch, logp_N: Tensor, __: Tensor) -> Tensor:
            losses.append(float(logp_N.detach().sum()))
            return -logp_N.sum()

        every, shares = range(self._batch.rollouts), self._shares
        passes = len(bins(self._batch, every, self._tokens, shares))
        self._backend.policy.accumulate(
            pack_micro_batches(self._batch, every, self._tokens, passes, self._even, shares), loss
        )
        return sum(losses)


class Padded:
    def __init__(self, config: Config) -> None:
        self._model: PreTrainedModel = load_causal_lm(config.model, config.run.seed)

    def prepare(self, batch: MicroBatch, prompt: int) -> None:
        self._model.zero_grad()
        self._prompt = prompt
        rows = batch.token_ids_N.split(list(batch.lengths_R))
        self._batches = [padded(rows[at : at + AT_ONCE]) for at in range(0, len(rows), AT_ONCE)]

    def run(self) -> float:
        total = 0.0
        for ids_RL, keep_RL in self._batches:
            said: Any = self._model(
                input_ids=ids_RL,
                attention_mask=keep_RL,
                logits_to_keep=slice(self._prompt - 1, -1),
                use_cache=False,
            )
            logp_RLV = said.logits.float().log_softmax(-1)
            answer_RL, keep_RL = ids_RL[:, self._prompt :], keep_RL[:, self._prompt :]
            logp_RL = logp_RLV.gather(2, answer_RL[..., None])[..., 0] * keep_RL
            (-logp_RL.sum()).backward()
            total += float(logp_RL.detach().sum())
        return total


def padded(rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(ids, which of them are real), [rollouts, longest]."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


if __name__ == "__main__":
    main()
