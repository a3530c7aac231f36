"""`MicroBatch`: packed tokens of several rollouts, no padding. The unit of one forward/backward.

Axes:  G groups · R rollouts · D segments of all rollouts · N tokens of all rollouts, one rollout after another (so a
group's rollouts are adjacent)

    token_ids_N     5 6 7 8 | 5 6 9 3 2      prompt 5 6, answers 7 8 and 9; a second segment with prompt 3, answer 2
    position_ids_N  0 1 2 3 | 0 1 2 0 1      starts again at each segment
    seq_N           0 0 0 0 | 1 1 1 1 1      which rollout a token belongs to
    loss_mask_N     0 0 1 1 | 0 0 1 0 1      1 where the policy made the token

The log-prob of token t is predicted at t-1: `logp_N[t]` is log π(token t | tokens of its segment before it), and 0 at
a segment's first token, which nothing predicts and no mask may include.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.device.copies import on_device
from asyncrl.types import MEDIA, NO_MEDIA, WITHOUT_STEPS, Group, MediaItem, Prompt, shown_in, without_steps


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of the losses of some rollouts, an attribute for each.

    token_ids_N, position_ids_N, seq_N int64 · loss_mask_N bool
    behaviour_N    float32, the recorded log μ, 0 where the mask is 0
    versions_N     int32, NO_VERSION where the mask is 0
    advantages_N   float32, 0 until they are known
    lengths_R      tokens of each rollout · group_R int64, the number of its group, from 0
    rewards_R      float32 · parts_R its parts by name · greedy_R of a greedy rollout of the task, NaN: none was made
    ordinals_R     int64, the task's ordinal · copies_R float32, how often the rollout counts (1, but for resampling)
    media_N        int32, the index in `media` of the item that the token stands for, -1: it is text
    temperature_R  float32, of the distribution that the rollout was sampled from; the learner applies it to its own
                   log-probs
    columns        further values per token by name, all [N]: those of `types.WITHOUT_STEPS` that came with the groups,
                   and experts, [N, W];
                   outputs of other models: values, cost_values (critics), reference, proximal, reward_model, teacher
                   (log-probs of the token); likeliest [N, K], the teacher's most likely tokens, and teacher_likeliest
                   [N, K + 1], its log-probs of them and of all others together; and those that `Experience` and
                   objectives add
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
    greedy_R: Tensor
    ordinals_R: Tensor
    copies_R: Tensor
    temperature_R: Tensor
    media_N: Tensor
    parts_R: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    media: tuple[MediaItem, ...] = ()

    @staticmethod
    def of(groups: Sequence[Group]) -> MicroBatch:
        """All rollouts of `groups`, which must have been sampled at temperatures above 0.

        Raises ValueError for no groups, for greedy ones, and for a mask on a segment's first token.
        """
        if not groups:
            raise ValueError("a micro-batch needs at least one group")
        greedy = [group.task.ordinal for group in groups if group.sampling.temperature <= 0]
        if greedy:
            raise ValueError(f"tasks {greedy} were answered greedily: no temperature above 0 to apply")
        sizes = [len(group.lengths) for group in groups]
        parts = sorted({name for group in groups for name in group.reward_parts})
        columns = sorted({name for group in groups for name in group.columns} - {"segment", MEDIA})
        lengths = np.concatenate([group.lengths for group in groups]).astype(np.int64)
        seq_N, _ = numbered(lengths)
        _, position_ids_N = numbered(np.concatenate([group.segment_lengths for group in groups]))
        media: tuple[MediaItem, ...] = ()
        media_N = torch.full_like(seq_N, NO_MEDIA, dtype=torch.int32)
        if any(group.media for group in groups):
            media, media_N = _joined_media([(group.media, _media_N(group)) for group in groups])
        batch = MicroBatch(
            token_ids_N=_joined(groups, "token_ids", np.int64),
            position_ids_N=position_ids_N,
            seq_N=seq_N,
            loss_mask_N=_joined(groups, "loss_mask", np.int8) != 0,
            behaviour_N=_joined(groups, "logprobs", np.float32),
            versions_N=_joined(groups, "versions", np.int32),
            advantages_N=torch.zeros(len(seq_N)),
            lengths_R=tuple(lengths.tolist()),
            group_R=_each(range(len(groups)), sizes, np.int64),
            rewards_R=_joined(groups, "rewards", np.float32),
            greedy_R=_each([np.nan if g.greedy_reward is None else g.greedy_reward for g in groups], sizes),
            ordinals_R=_each([group.task.ordinal for group in groups], sizes, np.int64),
            copies_R=torch.ones(len(lengths)),
            temperature_R=_each([group.sampling.temperature for group in groups], sizes),
            media_N=media_N,
            media=media,
            parts_R={name: _concatenated([_part(group, name) for group in groups]) for name in parts},
            columns={name: _concatenated([_column(group, name) for group in groups]) for name in columns},
        )
        if bool((batch.loss_mask_N & (batch.position_ids_N == 0)).any()):
            raise ValueError("a segment's first token has a loss mask, but nothing predicts it")
        return batch

    @staticmethod
    def of_tokens(token_ids_N: Tensor, lengths: Sequence[int], **values: Any) -> MicroBatch:
        """Rollouts of these tokens, each one segment and a group of its own, without policy tokens, rewards or
        advantages, but for the fields in `values`."""
        seq_N, position_ids_N = numbered(np.asarray(lengths, np.int64))
        zeros_N, zeros_R = torch.zeros(len(seq_N)), torch.zeros(len(lengths))
        numbers_R = torch.arange(len(lengths))
        fields: dict[str, Any] = {
            "token_ids_N": token_ids_N,
            "position_ids_N": position_ids_N,
            "seq_N": seq_N,
            "loss_mask_N": zeros_N.bool(),
            "behaviour_N": zeros_N,
            "versions_N": zeros_N.int(),
            "advantages_N": zeros_N,
            "lengths_R": tuple(lengths),
            "group_R": numbers_R,
            "rewards_R": zeros_R,
            "greedy_R": torch.full_like(zeros_R, torch.nan),
            "ordinals_R": numbers_R,
            "copies_R": torch.ones_like(zeros_R),
            "temperature_R": torch.ones_like(zeros_R),
            "media_N": torch.full_like(zeros_N, NO_MEDIA, dtype=torch.int32),
        }
        return MicroBatch(**(fields | values))

    @staticmethod
    def empty() -> MicroBatch:
        """One token that is not trained on: run by a rank without work while another rank has some."""
        return MicroBatch.of_tokens(torch.zeros(1, dtype=torch.int64), [1])

    @staticmethod
    def joined(batches: Sequence[MicroBatch]) -> MicroBatch:
        """All rollouts of `batches`, in the order of their ordinals; no group may be in two of them. Columns and parts
        of single batches are `completed` in the others."""
        columns = {name for batch in batches for name in batch.columns if name in WITHOUT_STEPS}
        parts = {name for batch in batches for name in batch.parts_R}
        batches = [batch.completed(columns, parts) for batch in batches]
        groups = np.cumsum([0] + [batch.groups for batch in batches])
        rollouts = np.cumsum([0] + [batch.rollouts for batch in batches])
        joined: dict[str, Any] = {}
        for entry in dataclasses.fields(MicroBatch):
            values = [getattr(batch, entry.name) for batch in batches]
            if isinstance(values[0], Tensor):
                joined[entry.name] = torch.cat(values)
            elif isinstance(values[0], Mapping):
                joined[entry.name] = {n: torch.cat([value[n] for value in values]) for n in sorted(values[0])}
        joined["group_R"] = torch.cat([b.group_R + g for b, g in zip(batches, groups, strict=False)])
        joined["seq_N"] = torch.cat([b.seq_N + r for b, r in zip(batches, rollouts, strict=False)])
        joined["media"], joined["media_N"] = _joined_media([(b.media, b.media_N) for b in batches])
        joined["lengths_R"] = tuple(length for batch in batches for length in batch.lengths_R)
        every = MicroBatch(**joined)
        return every.select(torch.argsort(every.ordinals_R, stable=True).tolist())

    def completed(self, columns: Iterable[str], parts: Iterable[str]) -> MicroBatch:
        """With these columns of steps and these reward parts: missing columns are as in `WITHOUT_STEPS`, missing parts
        are 0."""
        empty = {n: torch.from_numpy(without_steps(n, self.tokens)) for n in columns}
        none_R = torch.zeros(self.rollouts)
        return dataclasses.replace(
            self,
            columns=empty | dict(self.columns),
            parts_R=dict.fromkeys(parts, none_R) | dict(self.parts_R),
        )

    def of_ordinals(self, ordinals: Sequence[int]) -> MicroBatch | None:
        """The groups of these tasks, in their order here; None if there are none."""
        chosen = torch.isin(self.ordinals_R, torch.tensor(ordinals, dtype=torch.int64))
        return self.select(torch.nonzero(chosen)[:, 0].tolist()) if chosen.any() else None

    def with_advantages(self, advantages_N: Tensor) -> MicroBatch:
        return dataclasses.replace(self, advantages_N=advantages_N.to(self.behaviour_N.dtype))

    def with_columns(self, **columns_N: Tensor) -> MicroBatch:
        """The same with these columns, over those of the same name."""
        return dataclasses.replace(self, columns={**self.columns, **columns_N})

    def select(self, rollouts: Sequence[int]) -> MicroBatch:
        """Only these rollouts, in this order, as a micro-batch of their own; itself if these are all in their order."""
        if list(rollouts) == list(range(self.rollouts)):
            return self
        picked_R = torch.as_tensor(rollouts, dtype=torch.int64)
        token_N = self.tokens_of(rollouts)
        seq_N, _ = numbered(np.asarray(self.lengths_R, np.int64)[np.asarray(rollouts)])
        _, group_R = torch.unique_consecutive(self.group_R[picked_R], return_inverse=True)
        lengths_R = tuple(self.lengths_R[r] for r in rollouts)
        return self._taken(picked_R, token_N, lengths_R=lengths_R, seq_N=seq_N, group_R=group_R)

    def by_segment(self) -> MicroBatch:
        """The same tokens, each segment as a rollout of its own that has the values of its rollout. Itself where each
        rollout is one segment."""
        if self.segments == self.rollouts:
            return self
        lengths_D = self.segment_lengths
        rollout_D = self.seq_N[self.position_ids_N == 0]
        seq_N, _ = numbered(np.asarray(lengths_D, np.int64))
        return self._taken(rollout_D, slice(None), lengths_R=lengths_D, seq_N=seq_N)

    def _taken(self, rollout_R: Tensor, token_N: Tensor | slice, **made: Any) -> MicroBatch:
        """The values of these rollouts and of these tokens, and the fields in `made`."""

        def chosen(name: str, values: Any) -> Any:
            if isinstance(values, Mapping):
                return {
                    key: each[rollout_R if name == "parts_R" else token_N] for key, each in values.items()
                }
            return values[rollout_R if name.endswith("_R") else token_N]

        made["media"] = self.media
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return MicroBatch(**made, **{n: chosen(n, v) for n, v in fields.items() if n not in made})

    def tokens_of(self, rollouts: Sequence[int]) -> Tensor:
        """int64 indices into this batch of all tokens of these rollouts, in their order."""
        lengths = np.asarray(self.lengths_R, np.int64)
        starts = np.cumsum(lengths) - lengths
        return torch.from_numpy(
            np.concatenate([np.arange(starts[r], starts[r] + lengths[r]) for r in rollouts])
        )

    def texts(self, lengths: Sequence[int]) -> list[Prompt]:
        """The tokens as texts of these lengths, with what they show. On the CPU."""
        ends = np.cumsum(lengths)[:-1]
        of_texts = zip(
            np.split(self.token_ids_N.numpy(), ends), np.split(self.media_N.numpy(), ends), strict=True
        )
        return [Prompt(ids, shown_in(media, self.media)) for ids, media in of_texts]

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device, for work that is queued there later; itself if it is there already."""
        if self.token_ids_N.device == device:
            return self
        moved: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                moved[entry.name] = on_device(value, device)
            elif isinstance(value, Mapping):
                moved[entry.name] = {name: on_device(t, device) for name, t in value.items()}
        return dataclasses.replace(self, **moved)

    @property
    def groups(self) -> int:
        return int(self.group_R.max()) + 1

    @property
    def rollouts(self) -> int:
        return len(self.lengths_R)

    @property
    def segments(self) -> int:
        return int((self.position_ids_N == 0).sum())

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """[D]: tokens of each segment of each rollout. Only on the CPU, where nothing waits for values."""
        starts_D = torch.nonzero(self.position_ids_N == 0)[:, 0]
        return tuple(torch.diff(starts_D, append=torch.tensor([self.tokens])).tolist())

    @property
    def tokens(self) -> int:
        """N, prompts included."""
        return len(self.token_ids_N)


def _joined(groups: Sequence[Group], column: str, dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(group, column) for group in groups]).astype(dtype))


def _concatenated(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _each(values: Sequence[float], sizes: Sequence[int], dtype: type = np.float32) -> Tensor:
    """A value per group → one per rollout."""
    return torch.from_numpy(np.repeat(np.array(values, dtype), sizes))


def _part(group: Group, name: str) -> np.ndarray:
    """[n] float32: a part that the group lacks counts as 0, as it does for a rollout that lacks it."""
    return group.reward_parts.get(name, np.zeros(len(group.lengths), np.float32))


def _column(group: Group, name: str) -> np.ndarray:
    """[N], or [N, W]."""
    found = group.columns.get(name)
    return without_steps(name, len(group.token_ids)) if found is None else found


def _media_N(group: Group) -> Tensor:
    found = group.columns.get(MEDIA)
    return torch.full((group.tokens,), NO_MEDIA, dtype=torch.int32) if found is None else torch.tensor(found)


def _joined_media(
    parts: Sequence[tuple[Sequence[MediaItem], Tensor]],
) -> tuple[tuple[MediaItem, ...], Tensor]:
    """The media of all parts, each item once, and the column of their tokens."""
    index = {
        item: number
        for number, item in enumerate(dict.fromkeys(item for media, _ in parts for item in media))
    }
    # The last number is for tokens that stand for none.
    numbers = [
        torch.tensor([*(index[item] for item in media), NO_MEDIA], dtype=torch.int32) for media, _ in parts
    ]
    column = torch.cat([of[media_N.long()] for of, (_, media_N) in zip(numbers, parts, strict=True)])
    return tuple(index), column


def numbered(lengths: np.ndarray) -> tuple[Tensor, Tensor]:
    """([N] which one, [N] the place in it), of each token of rollouts or segments with these lengths."""
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)), torch.from_numpy(positions)
