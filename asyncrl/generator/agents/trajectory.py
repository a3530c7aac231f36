"""One rollout as it grows, entry by entry (`trajectory_entries.py`); existing entries never change.

`packed` is the whole trajectory as bytes, from which another process continues (`task_progress.py`). `TurnRequests`
makes the engine's requests for its turns.

Axes:  L tokens of the rollout
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgpack
import numpy as np

from asyncrl.counter_rng import stream_key
from asyncrl.generator.agents.trajectory_entries import (
    ENTRY_READERS,
    NO_IDS,
    ContextEntry,
    EndReason,
    PolicyEntry,
    TokenEntry,
    TrajectoryEnd,
    TrajectoryEntry,
    TrajectorySegment,
    entry_fields,
    experts_width,
    media_of,
    recorded_experts,
    segments_of,
)
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.types import (
    COLUMNS,
    NO_VERSION,
    WITHOUT_STEPS,
    Array,
    Finish,
    Prompt,
    Rollout,
    Sampling,
    Turn,
)

SEEDS = (1 << 63) - 1


class Trajectory:
    """Entries in order. length: tokens of all entries · turns: finished ones."""

    def __init__(self, entries: Iterable[TrajectoryEntry] = ()) -> None:
        self.clear()
        for entry in entries:
            self.add(entry)

    @staticmethod
    def unpack(packed: bytes, begun: bool = False) -> Trajectory:
        """begun: the bytes may continue entries that they do not contain. Their experts then begin with those of the
        last token of these.

        Raises ValueError for bytes that hold no trajectory.
        """
        trajectory = Trajectory()
        try:
            for kind, *fields in msgpack.Unpacker(io.BytesIO(packed)):
                trajectory.add(ENTRY_READERS[kind](*fields))
            if not begun:
                experts_width(trajectory.segments())
            if trajectory.packed != packed:
                raise ValueError("cut off")
        except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"no trajectory: {error!r}") from error
        return trajectory

    def clear(self) -> None:
        self.entries: list[TrajectoryEntry] = []
        self.length = self.turns = 0
        self._packed = bytearray()
        self._packed_entries = 0

    @property
    def packed(self) -> bytes:
        """The bytes of all entries."""
        for entry in self.entries[self._packed_entries :]:
            self._packed += msgpack.packb(entry_fields(entry))
            self._packed_entries += 1
        return bytes(self._packed)

    def keep_first(self, count: int) -> None:
        """Remove all entries behind the first `count`."""
        if len(self.entries) > count:
            kept = self.entries[:count]
            self.clear()
            for entry in kept:
                self.add(entry)

    def add(self, entry: TrajectoryEntry) -> None:
        self.entries.append(entry)
        if not isinstance(entry, TrajectoryEnd):
            self.length += len(entry.ids)
        if isinstance(entry, PolicyEntry) and entry.finish != "abort":
            self.turns += 1

    def add_turn(self, turn: Turn) -> None:
        """Add a turn that reads `context`, or a piece of one."""
        experts = turn.experts
        if experts is not None:
            # The last token of a turn runs, and is routed, in the next one.
            experts = experts[max((end - 1 for end, _ in self.segments()[-1].recorded), default=0) :]
        self.add(PolicyEntry(turn.output_ids, turn.logprobs, turn.versions, turn.finish, experts))

    @property
    def ended(self) -> EndReason | None:
        last = self.entries[-1] if self.entries else None
        return last.reason if isinstance(last, TrajectoryEnd) else None

    @property
    def interrupted(self) -> bool:
        """The engine interrupted the last turn, which has to be continued."""
        return self._last_finish == "abort"

    @property
    def unanswered(self) -> bool:
        """The last turn is over, and the environment has not answered yet."""
        return self._last_finish not in (None, "abort")

    @property
    def cut(self) -> bool:
        """The last turn ended at its limit of tokens."""
        return self._last_finish == "length"

    @property
    def _last_finish(self) -> Finish | None:
        """Returns None unless the last entry is the policy's."""
        last = self.entries[-1] if self.entries else None
        return last.finish if isinstance(last, PolicyEntry) else None

    @property
    def last_words(self) -> Array:
        """[T] int64: the last turn, as far as it goes if it is not over; empty after an answer."""
        pieces: list[Array] = [NO_IDS]
        for entry in reversed(self.entries):
            if isinstance(entry, ContextEntry):
                break
            if isinstance(entry, PolicyEntry):
                pieces.append(entry.ids)
        return np.concatenate(pieces[::-1])

    @property
    def ids(self) -> Array:
        """[.] int64: the tokens of all entries, each once."""
        given = [entry.ids for entry in self.entries if not isinstance(entry, TrajectoryEnd)]
        return np.concatenate([NO_IDS, *given])

    @property
    def context(self) -> Array:
        """[.] int64: the tokens of the last segment, all that the next turn reads."""
        return self.segments()[-1].ids

    def context_with(self, entry: ContextEntry) -> Prompt:
        """All that the next turn reads once `entry` is added."""
        return segments_of([*self.entries, entry])[-1].prompt

    @property
    def blind(self) -> bool:
        """Whether it lacks the pixels of a picture that it shows, as one that was unpacked does."""
        given = [entry for entry in self.entries if isinstance(entry, ContextEntry)]
        return any(not shown.item.arrays for entry in given for shown in entry.media)

    @property
    def turns_since_prompt(self) -> int:
        """Finished turns behind the last prompt."""
        count = 0
        for entry in reversed(self.entries):
            if isinstance(entry, ContextEntry) and entry.recalled == 0:
                break
            count += isinstance(entry, PolicyEntry) and entry.finish != "abort"
        return count

    def segments(self) -> list[TrajectorySegment]:
        """At least one."""
        return segments_of(self.entries)

    def within(self, turns: int, tokens: int) -> bool:
        """Whether it has at most so many turns, each with one context, and so many tokens in each segment."""
        contexts = sum(isinstance(entry, ContextEntry) for entry in self.entries)
        return max(self.turns, contexts) <= turns and all(len(each.ids) <= tokens for each in self.segments())

    def rollout(self, weights: Mapping[str, float]) -> Rollout:
        """With the environment's rewards, and each turn as a step. weights: of reward parts, 1 where there is none."""
        token_columns = [*_token_columns(self.segments())]
        columns = {name: np.concatenate([c[name] for c in token_columns]) for name in token_columns[0]}
        if columns["segment"][-1] == 0:
            del columns["segment"]
        if (experts := recorded_experts(self.segments())) is not None:
            columns["experts"] = experts
        total: Counter[str] = Counter()
        # Every entry behind the prompt that is not the policy's has the reward of the turn before it.
        rewards = [entry.parts for entry in self.entries[1:] if not isinstance(entry, PolicyEntry)]
        for turn, parts in enumerate(rewards):
            last = np.flatnonzero(columns["step"] == turn)[-1:]
            columns["step_rewards"][last] += _weighed(parts, weights)
            total.update(parts)
        entries = (entry for segment in self.segments() for entry in (*segment.repeated, *segment.own))
        finish: Finish = "stop" if self.ended == "done" else "length"
        return Rollout(
            token_ids=columns.pop("token_ids"),
            loss_mask=columns.pop("loss_mask"),
            logprobs=columns.pop("logprobs"),
            versions=columns.pop("versions"),
            finish=finish,
            reward=_weighed(total, weights),
            reward_parts=dict(total),
            columns=columns,
            media=media_of(entries),
        )


def _token_columns(segments: Iterable[TrajectorySegment]) -> Iterator[dict[str, Array]]:
    """The columns of each entry, segment by segment. The part that a segment repeats is context."""
    turn, anchor = 0, 0
    for number, segment in enumerate(segments):
        for entry in segment.repeated:
            yield _columns(ContextEntry(entry.ids, 0), number)
        for entry in segment.own:
            if isinstance(entry, ContextEntry):
                anchor = entry.anchor
                yield _columns(entry, number)
            else:
                yield _columns(entry, number, turn, anchor)
                turn += entry.finish != "abort"


def _weighed(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return float(sum(weights.get(name, 1.0) * part for name, part in parts.items()))


def _columns(
    entry: TokenEntry, segment: int, turn: int = WITHOUT_STEPS["step"], anchor: int = WITHOUT_STEPS["anchor"]
) -> dict[str, Array]:
    size, sampled = len(entry.ids), isinstance(entry, PolicyEntry)
    return {
        "token_ids": entry.ids,
        "loss_mask": np.full(size, sampled, np.int8),
        "logprobs": entry.logprobs if isinstance(entry, PolicyEntry) else np.zeros(size, np.float32),
        "versions": entry.versions if isinstance(entry, PolicyEntry) else np.full(size, NO_VERSION, np.int32),
        "step": np.full(size, turn, COLUMNS["step"]),
        "anchor": np.full(size, anchor, COLUMNS["anchor"]),
        "step_rewards": np.zeros(size, COLUMNS["step_rewards"]),
        "segment": np.full(size, segment, COLUMNS["segment"]),
    }


@dataclass(frozen=True, slots=True)
class TurnRequests:
    """Makes the requests of one rollout, the one with index `sample` among the `of` rollouts of its task."""

    request_id: str
    sampling: Sampling
    ordinal: int
    sample: int
    of: int

    def request(self, trajectory: Trajectory, most: int) -> SampleRequest:
        """Up to `most` further tokens of a turn. An engine draws by (seed, ordinal, index in the request, position in
        the turn), so the seed has to differ between turns and rollouts."""
        seed = int(stream_key(self.sampling.seed, self.sample, trajectory.length)) & SEEDS
        read = trajectory.segments()[-1].prompt
        return SampleRequest(
            f"{self.request_id}/{self.sample}/{trajectory.length}",
            read.ids,
            replace(self.sampling, max_tokens=most, seed=seed),
            self.ordinal,
            place=self.ordinal * self.of + self.sample,
            made=len(trajectory.last_words),
            media=read.media,
        )
