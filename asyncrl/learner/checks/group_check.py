"""The conditions on a group that is trained on. Groups come from other processes; none may end the learner.

`GroupCheck.fault` is a pure function of the group, the configuration and the version in training: ranks with the same
group get the same answer.

    corrupt      no correct worker of this run makes such a group: DROPPED(corrupt), as a group that cannot be read
    not_finite   a reward, a log-prob or a column is NaN or infinite: DROPPED(not_finite) under `on_bad_batch: skip`

Axes:  n rollouts · N tokens · P policy tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from transformers import PretrainedConfig

from asyncrl.learner.checks.finite_check import NOT_FINITE
from asyncrl.models.routing import RouterShape
from asyncrl.models.vision import item_fault
from asyncrl.types import COLUMNS, MEDIA, NO_MEDIA, NO_VERSION, UNROUTED, Array, Group, Version

CORRUPT: Final = "corrupt"
"""Why groups are dropped."""

LOGPROBS = (-80.0, 1.0)
"""The least and the largest log-prob of a sampled token. exp of 89 is beyond float32, and no engine draws a token of
probability e^-80; above 0 there is only rounding."""

TEMPERATURES = (1e-6, 1e6)
"""Between these, logits divided by the temperature are finite."""

LARGEST = 1e12
"""The largest reward, and value of a column: its square is finite in float32."""


class Fault(NamedTuple):
    """Why a group is not trained on. reason: under which it is counted, CORRUPT or NOT_FINITE."""

    ordinal: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """The requirements of a run on its groups.

    rollouts     of every group
    longest      tokens of one segment
    segments     most of one rollout
    router       the policy's, where groups have the experts that engines chose; None: groups have none
    vocabulary   tokens that every model of the learner has
    columns      those that pools add: every group has exactly them, beside `types.COLUMNS`
    likeliest    K and the policy's vocabulary: a pool's column of the teacher is [N, 2 + 2K], see `most_likely` of
                 models/logprobs.py, with tokens that the policy has; none: it is flat
    greedy       whether a group needs the reward of a greedy rollout
    truncated    whether its tokens may come from a support that was cut
    model        the configuration of the policy, for the images that it reads; None: none
    skip         whether groups with values that are not finite are dropped
    published    the newest version that an earlier learner of the run may have published
    """

    rollouts: int
    longest: int
    vocabulary: int
    columns: frozenset[str] = frozenset()
    likeliest: tuple[int, int] | None = None
    greedy: bool = False
    truncated: bool = True
    segments: int = 1
    router: RouterShape | None = None
    model: PretrainedConfig | None = None
    skip: bool = False
    published: Version = 0

    def fault(self, group: Group, version: Version) -> Fault | None:
        """The first fault; None: the group can be trained on. version: of the policy that is trained."""
        ordinal, newest = group.task.ordinal, max(version, self.published)
        # In this order: what is looked at later has the sizes that were compared before.
        for found in (self._shape, self._sampling, self._tokens, self._media, _values, self._columns):
            for text in found(group, newest):
                return Fault(ordinal, CORRUPT, text)
        if self.skip and (name := _not_finite(group)):
            return Fault(ordinal, NOT_FINITE, f"a value of {name} is not finite")
        return None

    def _shape(self, group: Group, newest: Version) -> Iterator[str]:
        count = len(group.lengths)
        if count != self.rollouts:
            yield f"it has {count} rollouts, and batch.group_size={self.rollouts}"
        if group.lengths.min() < 1:
            yield f"a rollout has {group.lengths.min()} tokens"
        tokens = int(group.lengths.sum())
        wide = {"column 'experts'": (self.router.width,)} if self.router else {}
        if self.likeliest:
            wide["column 'teacher'"] = (2 + 2 * self.likeliest[0],)
        for name, column in _of_tokens(group).items():
            if column.shape != (tokens, *wide.get(name, ())):
                yield f"{name} has the shape {column.shape}, its rollouts have {tokens} tokens"
        for name, column in _of_rollouts(group).items():
            if column.shape != (count,):
                yield f"{name} has the shape {column.shape}, it has {count} rollouts"
        yield from self._segments(group)

    def _segments(self, group: Group) -> Iterator[str]:
        first = np.cumsum(group.lengths) - group.lengths
        numbers = group.columns.get("segment", np.zeros(group.tokens, np.int32)).astype(np.int64)
        rises = np.diff(numbers, prepend=0)
        rises[first] = 0
        if ((rises < 0) | (rises > 1)).any() or numbers[first].any():
            yield "the segments of a rollout are not numbered 0, 1, and so on, one after another"
        if numbers.max() >= self.segments:
            yield f"a rollout has {numbers.max() + 1} segments, and at most {self.segments} are possible"
        if (longest := group.segment_lengths.max()) > self.longest:
            yield f"a segment has {longest} tokens, and generator.max_length={self.longest}"

    def _sampling(self, group: Group, newest: Version) -> Iterator[str]:
        sampling = group.sampling
        if not TEMPERATURES[0] <= sampling.temperature <= TEMPERATURES[1]:
            yield f"it was sampled at temperature {sampling.temperature:g}, which log-probs cannot be computed for"
        if sampling.truncated and not self.truncated:
            yield f"it was sampled with {sampling}: its support was cut, and algorithm.truncated=refuse"
        if self.greedy and group.greedy_reward is None:
            yield "it lacks the reward of a greedy rollout, which the algorithm compares with"

    def _tokens(self, group: Group, newest: Version) -> Iterator[str]:
        ids, mask = group.token_ids, group.loss_mask
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            yield f"token {wrong} is none of the {self.vocabulary} of the learner's models"
        if ((mask != 0) & (mask != 1)).any():
            yield "its loss mask is neither 0 nor 1"
        lengths = group.segment_lengths
        if mask[np.cumsum(lengths) - lengths].any():
            yield "a segment's first token has a loss mask, but nothing predicts it"
        versions_P = group.versions[mask != 0]
        if len(versions_P) and versions_P.min() <= NO_VERSION:
            yield f"a policy token has the version {versions_P.min()}"
        if group.versions.max() > newest or group.versions.min() < NO_VERSION:
            wrong = group.versions.max() if group.versions.max() > newest else group.versions.min()
            yield f"a token has the version {wrong}, the newest is {newest}"

    def _media(self, group: Group, newest: Version) -> Iterator[str]:
        """Each item stands behind text, in as many tokens as it has."""
        media = group.columns.get(MEDIA)
        if media is None:
            if group.media:
                yield "no token stands for its images"
            return
        if media.min() < NO_MEDIA or media.max() >= len(group.media):
            yield f"a token stands for item {media.max()} of {len(group.media)}"
        for item in group.media:
            if fault := item_fault(self.model, item):
                yield f"an {item.kind} cannot be read: {fault}"
        shown, lengths = media != NO_MEDIA, group.segment_lengths
        if shown[np.cumsum(lengths) - lengths].any() or group.loss_mask[shown].any():
            yield "an item stands at the beginning of a segment, or for a token of the policy"
        edges = np.diff(shown.astype(np.int8), prepend=0, append=0)
        begins, ends = np.flatnonzero(edges > 0), np.flatnonzero(edges < 0)
        tokens = np.array([item.tokens for item in group.media], np.int64)[media[begins]]
        inside = shown[1:] & shown[:-1] & (media[1:] != media[:-1])
        if (ends - begins != tokens).any() or inside.any():
            yield "other than its number of tokens stand for an item"

    def _columns(self, group: Group, newest: Version) -> Iterator[str]:
        if missing := sorted(self.columns - group.columns.keys()):
            yield f"it lacks the column {missing[0]!r}"
        if self.router:
            yield from _experts(group.columns.get("experts"), self.router)
        elif "experts" in group.columns:
            yield "it has the column 'experts', which is for model.router_replay=true"
        for name, column in group.columns.items():
            if name not in COLUMNS and name not in self.columns:
                yield f"it has a column {name!r}, which no pool of this run adds"
            if column.dtype.kind != "f" if name not in COLUMNS else column.dtype != COLUMNS[name]:
                yield f"column {name!r} is of {column.dtype}"
            if column.dtype.kind == "f" and (_finite(column) > LARGEST).any():
                yield f"column {name!r} has a value above {LARGEST:g}"
        if self.likeliest:
            count, vocabulary = self.likeliest
            yield from _likeliest(group.columns["teacher"], group.loss_mask != 0, count, vocabulary)
        if "step" in group.columns and group.columns["step"].min() < -1:
            yield f"a token belongs to step {group.columns['step'].min()}"


def _likeliest(column_NW: Array, policy_N: Array, count: int, vocabulary: int) -> Iterator[str]:
    """Not a number is none of them, too."""
    token_NK = column_NW[:, 2 + count :]
    wrong_NK = ~((token_NK >= 0) & (token_NK < vocabulary) & (token_NK == np.floor(token_NK)))
    if wrong_NK.any():
        yield f"a most likely token of the teacher is {token_NK[wrong_NK][0]:g}, none of the policy's {vocabulary}"
    if (np.diff(np.sort(token_NK[policy_N], axis=1)) == 0).any():
        yield "two of the teacher's most likely tokens are the same"
    logp_P = column_NW[policy_N, : 2 + count]
    if (logp_P > LOGPROBS[1]).any():
        yield f"the teacher gives the log-prob {logp_P.max():g}, which is above {LOGPROBS[1]:g}"


def _experts(experts_NW: Array | None, router: RouterShape) -> Iterator[str]:
    if experts_NW is None:
        yield "it lacks the column 'experts', which model.router_replay needs"
    elif experts_NW.min() < UNROUTED or experts_NW.max() >= router.experts:
        wrong = experts_NW.min() if experts_NW.min() < UNROUTED else experts_NW.max()
        yield f"a token went to expert {wrong}, and the policy has {router.experts}"


def _values(group: Group, newest: Version) -> Iterator[str]:
    least, most = LOGPROBS
    logp_P = group.logprobs[(group.loss_mask != 0) & np.isfinite(group.logprobs)]
    if len(logp_P) and (logp_P.min() < least or logp_P.max() > most):
        wrong = logp_P.min() if logp_P.min() < least else logp_P.max()
        yield f"a policy token has the log-prob {wrong:g}, which is not between {least:g} and {most:g}"
    for name, values_n in _of_rollouts(group).items():
        if (_finite(values_n) > LARGEST).any():
            yield f"{name} has a value above {LARGEST:g}"
    if group.greedy_reward is not None and not abs(group.greedy_reward) <= LARGEST:
        yield f"the reward of its greedy rollout is {group.greedy_reward:g}"


def _not_finite(group: Group) -> str:
    """The name of the first values that are not finite; empty if all are. Beyond the loss mask no value counts."""
    policy_N = group.loss_mask != 0
    columns = {name: column for name, column in group.columns.items() if column.dtype.kind == "f"}
    for name, values_N in {"logprobs": group.logprobs, **columns}.items():
        if not np.isfinite(values_N[policy_N]).all():
            return name
    return next((name for name, values in _of_rollouts(group).items() if not np.isfinite(values).all()), "")


def _finite(values: Array) -> Array:
    """The sizes of the values that are finite."""
    return np.abs(values[np.isfinite(values)])


def _of_tokens(group: Group) -> Mapping[str, Array]:
    own = {name: getattr(group, name) for name in ("token_ids", "loss_mask", "logprobs", "versions")}
    return {**own, **{f"column {name!r}": column for name, column in group.columns.items()}}


def _of_rollouts(group: Group) -> Mapping[str, Array]:
    return {
        "rewards": group.rewards,
        **{f"reward part {name!r}": p for name, p in group.reward_parts.items()},
    }
