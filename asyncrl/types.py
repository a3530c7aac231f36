"""The four records that processes exchange. Nothing here needs torch, sockets or files.

    Task     one prompt with its ordinal in the task stream: the unit of accounting
    Turn     one engine call: tokens in, tokens out, a log-prob and a policy version per output token
    Rollout  one finished trajectory: token ids, loss mask, log-probs, versions, reward, why it ended
    Group    the rollouts of one task: the unit of transfer, of advantage normalisation and of staleness

A reward function may return `Step` and `Scored`. `MicroBatch`, the learner's batch of groups, needs torch and is in
`learner/data/batch.py`.

A rollout is one context, or several segments one after another, each a context of its own: a sub-agent, a history that
was rewritten, a prompt that the environment composed. No token sees another segment, and positions begin anew.

A text of tokens may show images and videos: a `MediaItem` is one of them, `Shown` is its place in a text.

Axes:  n rollouts of a group · L tokens of one rollout · N tokens of a whole group, rollouts one after another
       D segments of all of them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

Version = int
"""The learner's count of published policies. 0 is the policy that the run started from."""

NO_VERSION: Version = -1
"""The version of a token that no policy made (prompt, tool output)."""

StreamName = Literal["train", "eval"]
TRAIN: Final = "train"
EVAL: Final = "eval"
"""The queue's two streams of tasks."""

Finish = Literal["stop", "length", "abort"]
"""Why a rollout ended: its end token, `generator.max_tokens`, or an interruption."""

MediaKind = Literal["image", "video"]

Array = np.ndarray

COLUMNS: Mapping[str, str] = {
    "step": "int32",
    "anchor": "int64",
    "step_rewards": "float32",
    "segment": "int32",
    "experts": "int16",
    "media": "int32",
}
"""Columns that a rollout may carry, and their dtypes; one value per token, but for `experts`.

step          index of the step (turn of an agent, line of a proof) within its rollout, from 0; -1 where the mask is 0
              and where the policy's token belongs to no step
anchor        a hash of the state that the step began in; equal states of one task have equal hashes. 0 where step is -1
step_rewards  a step's own reward on its last policy token, else 0. `Rollout.reward` includes it
segment       index of the token's segment within its rollout: 0, then the same or one more from token to token. Without
              the column each rollout is one segment
experts       [L, W]: for each layer in order the numbers of the experts to which its router sent the token, UNROUTED in
              layers without a router and at tokens that no engine has run
media         the index in `Group.media` of the item that the token stands for; -1: it is text. `Group` makes it
"""

UNROUTED: Final = -1
"""No expert, in the column `experts`."""

WITHOUT_STEPS: Mapping[str, int] = {"step": -1, "anchor": 0, "step_rewards": 0}
"""The value of these columns throughout a group or a segment that came without them."""

MEDIA: Final = "media"
NO_MEDIA: Final = -1
"""The column of what tokens stand for, and its value for text."""

ANSWER = "#answer"
"""A reward part of rollouts of an evaluation: the number of its answer among its task's, from 1; 0: it has none."""

UNSCORED = "#unscored"
"""A reward part of rollouts of an evaluation: 1 if it counts as 0 because it could not be had or not be scored."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt (or environment seed).

    ordinal  position in the run's task stream, from 0; the unit that the ledger accounts for
    prompt   text, or chat messages [{"role": ..., "content": ...}] to be put through the chat template; a content is a
             text, or a list of {"type": "text", "text": ...} and {"type": "image", "image": encoded bytes or a path}
    data     whatever the reward function needs, plain msgpack-able values, e.g. {"answer": "132"}
    """

    ordinal: int
    prompt: str | list[dict[str, Any]]
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The way in which tokens were (or are to be) drawn. Every group contains it: the learner divides its logits by the
    same temperature, but applies no top_p, top_k or min_p (docs/sampling.md).

    temperature  0 means greedy
    max_tokens   most output tokens of one turn
    seed         with the ordinal, the sample's index and the token's position it fixes every draw
    top_p, top_k, min_p      the support is cut, in the order min_p, top_k, top_p: to tokens at least min_p times as
                 likely as the likeliest, to the top_k likeliest (0: all), to the fewest that have the mass top_p.
                 Log-probs are of what is left, which has the mass 1 again. Greedy sampling has none of it
    stop         texts that end a turn. They change no probability, and do not travel with a group
    """

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn although the policy gives them a probability."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Step:
    """The reward of one step of an answer, `text[start:stop]`, for algorithms that credit steps.

    start, stop  characters of the text, `stop` excluded
    reward       the step's own, beside the parts of the whole answer
    anchor       the state that the step begins in; steps of one task with equal anchors are compared.
                 none: all of the text before it
    """

    start: int
    stop: int
    reward: float = 0.0
    anchor: str | bytes | int | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A return value of reward functions in place of a number or of parts by name.

    parts   the reward of the whole answer: a number, or its parts by name, at least one
    steps   in the text's order, without overlap; what lies between two steps belongs to none. None: no steps at all
    answer  what the text comes to, by which the rollouts of a task are compared. None: the function found none
    """

    parts: float | Mapping[str, float]
    steps: Sequence[Step] | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image or video as the model's processor gives it.

    tokens  how many tokens stand for it, one after another
    arrays  arguments of the model's get_<kind>_features by name, for this item alone; those of several items are
            joined along the first axis
    digest  the same for equal items, and only for them
    """

    kind: MediaKind
    tokens: int
    arrays: Mapping[str, Array] = field(compare=False)
    digest: bytes


@dataclass(frozen=True, slots=True)
class Shown:
    """A place of a text: tokens start … start + item.tokens - 1 stand for the item."""

    start: int
    item: MediaItem

    def moved(self, by: int) -> Shown:
        """The same place where `by` more tokens stand before it."""
        return Shown(self.start + by, self.item)


@dataclass(frozen=True, slots=True)
class Prompt:
    """An engine's input: ids [P] int64, and the items that they show, in the order of the places."""

    ids: Array
    media: tuple[Shown, ...] = ()

    def tobytes(self) -> bytes:
        """Bytes that are equal for prompts with equal tokens and equal items."""
        return b"".join([self.ids.tobytes(), *(shown.item.digest for shown in self.media)])


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine call for one sample.

    prompt_ids [P] int64 · output_ids [T] int64 · logprobs [T] float32 of the distribution sampled from
    versions [T] int32, the policy version whose weights made each output token
    experts [P + T, W] int16, see `COLUMNS`; None: the engine does not record them
    """

    prompt_ids: Array
    output_ids: Array
    logprobs: Array
    versions: Array
    finish: Finish
    experts: Array | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished trajectory, all arrays of length L.

    token_ids int64 · loss_mask int8, 1 where the policy made the token · logprobs float32, 0 where the mask is 0
    versions int32, NO_VERSION where the mask is 0 · reward_parts: what the reward is the weighted sum of
    columns: further arrays by name, L values or rows, see `COLUMNS` · media: what its tokens show
    """

    token_ids: Array
    loss_mask: Array
    logprobs: Array
    versions: Array
    finish: Finish
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Array] = field(default_factory=dict)
    media: tuple[Shown, ...] = ()

    @staticmethod
    def from_turn(turn: Turn, media: tuple[Shown, ...] = ()) -> Rollout:
        """A single-turn rollout, not yet rewarded. media: of its prompt"""
        p, t = len(turn.prompt_ids), len(turn.output_ids)
        return Rollout(
            token_ids=np.concatenate([turn.prompt_ids, turn.output_ids]).astype(np.int64, copy=False),
            loss_mask=np.concatenate([np.zeros(p, np.int8), np.ones(t, np.int8)]),
            logprobs=np.concatenate([np.zeros(p, np.float32), turn.logprobs.astype(np.float32, copy=False)]),
            versions=np.concatenate(
                [np.full(p, NO_VERSION, np.int32), turn.versions.astype(np.int32, copy=False)]
            ),
            finish=turn.finish,
            columns={} if turn.experts is None else {"experts": turn.experts},
            media=media,
        )

    @staticmethod
    def from_segments(segments: Sequence[Rollout]) -> Rollout:
        """One rollout of these segments, in order. Its end and its reward are those of the last one.

        The numbers of segments and steps go on from one to the next. Each may itself consist of several. Raises
        ValueError for no segments, and for one that is empty or begins with a policy token, which nothing predicts.
        """
        if not segments:
            raise ValueError("a rollout needs at least one segment")
        for number, segment in enumerate(segments):
            if not len(segment.token_ids) or segment.loss_mask[0]:
                raise ValueError(f"segment {number} does not begin with a token of its context")
        if len(segments) == 1:
            return segments[0]
        last = segments[-1]
        return Rollout(
            token_ids=np.concatenate([s.token_ids for s in segments]),
            loss_mask=np.concatenate([s.loss_mask for s in segments]),
            logprobs=np.concatenate([s.logprobs for s in segments]),
            versions=np.concatenate([s.versions for s in segments]),
            finish=last.finish,
            reward=last.reward,
            reward_parts=last.reward_parts,
            columns=_columns_of_segments(segments),
            media=_media_of_segments(segments),
        )

    def segment_tokens(self) -> list[tuple[Array, Array]]:
        """(token ids, which of them are the policy's) of each segment."""
        starts = 1 + np.flatnonzero(np.diff(self.columns.get("segment", ())))
        mine = np.split(self.loss_mask != 0, starts)
        return list(zip(np.split(self.token_ids, starts), mine, strict=True))

    def without_steps(self) -> Rollout:
        """Without the columns of steps."""
        kept = {name: column for name, column in self.columns.items() if name not in WITHOUT_STEPS}
        return dataclasses.replace(self, columns=kept)


@dataclass(frozen=True, slots=True)
class Group:
    """The n rollouts of one task, stored flat: four token columns and a length per rollout.

    lengths [n] int64, sum N · token_ids, loss_mask, logprobs, versions [N] as in `Rollout` · rewards [n] float32
    reward_parts {name: [n] float32} · finish n literals · sampling: how the tokens were drawn
    columns {name: [N]}: `COLUMNS`, and what other pools have added per token (values, reference log-probs)
    greedy_reward: of one greedy rollout of the task, where one was made · media: what its rollouts show, each item once
    """

    task: Task
    sampling: Sampling
    lengths: Array
    token_ids: Array
    loss_mask: Array
    logprobs: Array
    versions: Array
    rewards: Array
    finish: tuple[Finish, ...]
    reward_parts: Mapping[str, Array] = field(default_factory=dict)
    columns: Mapping[str, Array] = field(default_factory=dict)
    greedy_reward: float | None = None
    media: tuple[MediaItem, ...] = ()

    @staticmethod
    def from_rollouts(
        task: Task, sampling: Sampling, rollouts: Sequence[Rollout], greedy_reward: float | None = None
    ) -> Group:
        """Concatenate. A reward part that some rollout lacks counts as 0 there.

        Raises ValueError for no rollouts, and for a column that is unknown, or that one of them lacks or has too short.
        """
        if not rollouts:
            raise ValueError(f"task {task.ordinal}: a group needs at least one rollout")
        parts = sorted({name for r in rollouts for name in r.reward_parts})
        media = tuple(dict.fromkeys(shown.item for r in rollouts for shown in r.media))
        return Group(
            task=task,
            sampling=sampling,
            lengths=np.array([len(r.token_ids) for r in rollouts], np.int64),
            token_ids=np.concatenate([r.token_ids for r in rollouts]),
            loss_mask=np.concatenate([r.loss_mask for r in rollouts]),
            logprobs=np.concatenate([r.logprobs for r in rollouts]),
            versions=np.concatenate([r.versions for r in rollouts]),
            rewards=np.array([r.reward for r in rollouts], np.float32),
            finish=tuple(r.finish for r in rollouts),
            reward_parts={
                p: np.array([r.reward_parts.get(p, 0.0) for r in rollouts], np.float32) for p in parts
            },
            columns=_joined_columns(task, rollouts) | _media_column(rollouts, media),
            greedy_reward=greedy_reward,
            media=media,
        )

    def rollouts(self) -> Iterator[Rollout]:
        """Views, no copies."""
        ends = np.cumsum(self.lengths)
        for i, (end, length) in enumerate(zip(ends, self.lengths, strict=True)):
            at = slice(end - length, end)
            yield Rollout(
                token_ids=self.token_ids[at],
                loss_mask=self.loss_mask[at],
                logprobs=self.logprobs[at],
                versions=self.versions[at],
                finish=self.finish[i],
                reward=float(self.rewards[i]),
                reward_parts={name: float(column[i]) for name, column in self.reward_parts.items()},
                columns={name: column[at] for name, column in self.columns.items() if name != MEDIA},
                media=shown_in(self.columns[MEDIA][at], self.media) if self.media else (),
            )

    @property
    def tokens(self) -> int:
        """N: tokens of all rollouts, prompts included."""
        return int(self.lengths.sum())

    @property
    def segment_lengths(self) -> Array:
        """[D] int64: tokens of each segment of each rollout."""
        lengths, numbers = np.asarray(self.lengths), self.columns.get("segment")
        if numbers is None:
            return lengths
        later = 1 + np.flatnonzero(numbers[1:] != numbers[:-1])
        starts = np.union1d(np.cumsum(lengths) - lengths, later)
        return np.diff(starts, append=len(numbers))

    @property
    def start_version(self) -> Version:
        """The oldest version that made a token of this group: what the staleness bound is about."""
        made = self.versions[self.versions != NO_VERSION]
        return int(made.min()) if made.size else NO_VERSION


def oldest_version(versions: Iterable[Version]) -> Version:
    """Over those that made something; NO_VERSION: none did."""
    return min((version for version in versions if version != NO_VERSION), default=NO_VERSION)


def _columns_of_segments(segments: Sequence[Rollout]) -> dict[str, Array]:
    """{name: [L], or [L, W]}: all their columns, and the number of each segment. Raises ValueError for a segment that
    lacks `experts`, which have no value of their own for that."""
    columns = {"segment": _numbered_on(list(map(_segment_column, segments)))}
    for name in sorted({name for s in segments for name in s.columns} - {"segment"}):
        lacking = [s for s in segments if name not in s.columns]
        if lacking and name not in WITHOUT_STEPS:
            raise ValueError(f"{len(lacking)} of {len(segments)} segments lack the column {name!r}")
        each = [
            s.columns[name] if name in s.columns else without_steps(name, len(s.token_ids)) for s in segments
        ]
        columns[name] = _numbered_on(each) if name == "step" else np.concatenate(each)
    return columns


def without_steps(name: str, tokens: int) -> Array:
    """The column of tokens that came without it, one of `WITHOUT_STEPS`."""
    return np.full(tokens, WITHOUT_STEPS[name], COLUMNS[name])


def _numbered_on(columns: Sequence[Array]) -> Array:
    """Numbers from 0 in each column, counted on from one to the next. Those below 0 stay."""
    after, first = [], 0
    for column in columns:
        after.append(np.where(column < 0, column, column + first).astype(column.dtype))
        first = max(first, int(after[-1].max()) + 1)
    return np.concatenate(after)


def _media_of_segments(segments: Sequence[Rollout]) -> tuple[Shown, ...]:
    starts = np.cumsum([0, *(len(s.token_ids) for s in segments)]).tolist()
    return tuple(shown.moved(at) for at, s in zip(starts, segments, strict=False) for shown in s.media)


def _segment_column(rollout: Rollout) -> Array:
    """[L]: its column `segment`; zeros without one."""
    return rollout.columns.get("segment", np.zeros(len(rollout.token_ids), COLUMNS["segment"]))


def _joined_columns(task: Task, rollouts: Sequence[Rollout]) -> dict[str, Array]:
    """{name: [N], or [N, W]} of the dtypes in `COLUMNS`."""
    joined: dict[str, Array] = {}
    for name in sorted({name for r in rollouts for name in r.columns}):
        if name not in COLUMNS or name == MEDIA:
            raise ValueError(f"task {task.ordinal}: unknown column {name!r}, known are {sorted(COLUMNS)}")
        each = [_segment_column(r) if name == "segment" else r.columns.get(name, ()) for r in rollouts]
        if any(len(column) != len(r.token_ids) for column, r in zip(each, rollouts, strict=True)):
            raise ValueError(
                f"task {task.ordinal}: column {name!r} needs a value for each token of every rollout"
            )
        joined[name] = np.concatenate(each).astype(COLUMNS[name])
    return joined


def _media_column(rollouts: Sequence[Rollout], items: tuple[MediaItem, ...]) -> dict[str, Array]:
    """{MEDIA: [N]}, or nothing where nothing is shown."""
    if not items:
        return {}
    index = {item: number for number, item in enumerate(items)}
    column = np.full(sum(len(r.token_ids) for r in rollouts), NO_MEDIA, COLUMNS[MEDIA])
    begin = 0
    for rollout in rollouts:
        for start, item in ((begin + shown.start, shown.item) for shown in rollout.media):
            column[start : start + item.tokens] = index[item]
        begin += len(rollout.token_ids)
    return {MEDIA: column}


def shown_in(media: Array, items: Sequence[MediaItem]) -> tuple[Shown, ...]:
    """The items that the tokens of a rollout, or of a part of one, show. media: their part of the column MEDIA."""
    found: list[Shown] = []
    end = 0
    for at in np.flatnonzero(media >= 0).tolist():
        if at >= end:
            found.append(Shown(at, items[media[at]]))
            end = at + found[-1].item.tokens
    return tuple(found)
