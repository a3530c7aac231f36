"""`MicroBatch`: packed tokens of several rollouts, no padding. The unit of one forward/backward.

Axes:  G groups · R rollouts · N tokens of all rollouts, one rollout after another (so a group's rollouts are
adjacent)

    token_ids_N     5 6 7 8 | 5 6 9          prompt 5 6, answers 7 8 and 9
    position_ids_N  0 1 2 3 | 0 1 2          starts again at each rollout
    seq_N           0 0 0 0 | 1 1 1          which rollout a token belongs to
    loss_mask_N     0 0 1 1 | 0 0 1          1 where the policy made the token

The log-prob of token t is predicted at t-1: `logp_N[t]` is log π(token t | tokens before it), and 0 at a
rollout's first token, which nothing predicts and no mask may ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.types import Group


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Everything that the loss of some rollouts needs.

    token_ids_N, position_ids_N, seq_N int64 · loss_mask_N bool · behaviour_N float32, the recorded log μ, 0
    where the mask is 0 · versions_N int32, NO_VERSION where the mask is 0 · advantages_N float32, 0 until
    they are known lengths_R tokens of each rollout · group_R the number of its group, from 0 · rewards_R
    float32 temperature of the sampling distribution, which the learner applies to its own log-probs
    """

    token_ids_N: Tensor
    position_ids_N: Tensor
    seq_N: Tensor
    loss_mask_N: Tensor
    behaviour_N: Tensor
    versions_N: Tensor
    advantages_N: Tensor
    lengths_R: tuple[int, ...]
    group_R: Tensor
    rewards_R: Tensor
    temperature: float

    @staticmethod
    def of(groups: Sequence[Group]) -> MicroBatch:
        """All rollouts of `groups`, which must have been sampled at one temperature above 0.

        Raises ValueError for no groups, for mixed or zero temperatures, and for a mask on a rollout's first
        token.
        """
        temperatures = {group.sampling.temperature for group in groups}
        if len(temperatures) != 1 or min(temperatures) <= 0:
            raise ValueError(f"one micro-batch needs one temperature above 0, got {sorted(temperatures)}")
        lengths = np.concatenate([group.lengths for group in groups]).astype(np.int64)
        seq_N, position_ids_N = _segments(lengths)
        batch = MicroBatch(
            token_ids_N=_joined(groups, "token_ids", np.int64),
            position_ids_N=position_ids_N,
            seq_N=seq_N,
            loss_mask_N=_joined(groups, "loss_mask", np.int8) != 0,
            behaviour_N=_joined(groups, "logprobs", np.float32),
            versions_N=_joined(groups, "versions", np.int32),
            advantages_N=torch.zeros(len(seq_N)),
            lengths_R=tuple(lengths.tolist()),
            group_R=torch.repeat_interleave(
                torch.arange(len(groups)), torch.tensor([len(group.lengths) for group in groups])
            ),
            rewards_R=_joined(groups, "rewards", np.float32),
            temperature=temperatures.pop(),
        )
        if bool((batch.loss_mask_N & (batch.position_ids_N == 0)).any()):
            raise ValueError("a rollout's first token has a loss mask, but nothing predicts it")
        return batch

    @staticmethod
    def empty() -> MicroBatch:
        """One token that nobody trains on: what a rank runs while another rank has work."""
        zero_1 = torch.zeros(1, dtype=torch.int64)
        return MicroBatch(
            token_ids_N=zero_1,
            position_ids_N=zero_1,
            seq_N=zero_1,
            loss_mask_N=zero_1.bool(),
            behaviour_N=torch.zeros(1),
            versions_N=zero_1.int(),
            advantages_N=torch.zeros(1),
            lengths_R=(1,),
            group_R=zero_1,
            rewards_R=torch.zeros(1),
            temperature=1.0,
        )

    def with_advantages(self, advantages_N: Tensor) -> MicroBatch:
        return dataclasses.replace(self, advantages_N=advantages_N.to(self.behaviour_N.dtype))

    def select(self, rollouts: Sequence[int]) -> MicroBatch:
        """Only these rollouts, in this order, as a micro-batch of their own."""
        picked_R = torch.as_tensor(rollouts, dtype=torch.int64)
        lengths = np.asarray(self.lengths_R, np.int64)
        starts = np.cumsum(lengths) - lengths
        token_N = torch.from_numpy(
            np.concatenate([np.arange(starts[r], starts[r] + lengths[r]) for r in rollouts])
        )
        seq_N, position_ids_N = _segments(lengths[np.asarray(rollouts)])
        _, group_R = torch.unique_consecutive(self.group_R[picked_R], return_inverse=True)
        return MicroBatch(
            token_ids_N=self.token_ids_N[token_N],
            position_ids_N=position_ids_N,
            seq_N=seq_N,
            loss_mask_N=self.loss_mask_N[token_N],
            behaviour_N=self.behaviour_N[token_N],
            versions_N=self.versions_N[token_N],
            advantages_N=self.advantages_N[token_N],
            lengths_R=tuple(self.lengths_R[r] for r in rollouts),
            group_R=group_R,
            rewards_R=self.rewards_R[picked_R],
            temperature=self.temperature,
        )

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device; itself if it is there already."""
        if self.token_ids_N.device == device:
            return self
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **moved)

    @property
    def rollouts(self) -> int:
        return len(self.lengths_R)

    @property
    def tokens(self) -> int:
        """N, prompts included."""
        return len(self.token_ids_N)


def _joined(groups: Sequence[Group], column: str, dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(group, column) for group in groups]).astype(dtype))


def _segments(lengths: np.ndarray) -> tuple[Tensor, Tensor]:
    """(seq_N, position_ids_N) of rollouts with these lengths."""
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)), torch.from_numpy(positions)
