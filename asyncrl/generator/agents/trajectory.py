"""One rollout as it grows, entry by entry; what is in it never changes.

    Given   the prompt, later what the environment answers     loss mask 0, NO_VERSION
    Said    a turn of the policy, or a piece of one            loss mask 1, its log-probs and versions
    Ended   why

    Given Said Given Said Ended                 two turns
    Given Said(abort) Said Ended                one turn, interrupted once

`packed` is all of it as bytes, from which another process goes on.

Axes:  L tokens of the rollout
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack
import numpy as np

from asyncrl.types import COLUMNS, NO_VERSION, WITHOUT_STEPS, Array, Finish, Rollout

Why = Literal["done", "max_turns", "turn_tokens", "total_tokens"]
"""The environment said so · agent.max_turns · generator.max_tokens of one turn · no room for another turn."""


NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ContextEntry:
    """ids [.] int64 · anchor: a hash of the state that the next turn begins in · parts: reward of the turn before."""

    ids: Array
    anchor: int
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """ids [T] int64, logprobs [T] float32, versions [T] int32. finish "abort": the turn goes on with the next one."""

    ids: Array
    logprobs: Array
    versions: Array
    finish: Finish


@dataclass(frozen=True, slots=True)
class TrajectoryEnd:
    """parts: reward of the last turn."""

    why: Why
    parts: Mapping[str, float] = field(default_factory=dict)


TrajectoryEntry = ContextEntry | PolicyEntry | TrajectoryEnd


class Trajectory:
    """Entries in order. `packed` grows with them."""

    def __init__(self) -> None:
        self.clear()

    @staticmethod
    def unpack(packed: bytes) -> Trajectory:
        """Raises ValueError for bytes that are none."""
        made = Trajectory()
        try:
            for kind, *fields in msgpack.Unpacker(io.BytesIO(packed)):
                made.add(READ[kind](*fields))
            if made.packed != packed:
                raise ValueError("cut off")
        except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"no trajectory: {error!r}") from error
        return made

    def clear(self) -> None:
        """Begin anew."""
        self.entries: list[TrajectoryEntry] = []
        self.packed = bytearray()
        self.length = self.turns = 0
        """Tokens so far · turns that are over."""

    def add(self, entry: TrajectoryEntry) -> None:
        self.entries.append(entry)
        self.packed += msgpack.packb(_fields(entry))
        if not isinstance(entry, TrajectoryEnd):
            self.length += len(entry.ids)
        if isinstance(entry, PolicyEntry) and entry.finish != "abort":
            self.turns += 1

    @property
    def ended(self) -> Why | None:
        last = self.entries[-1] if self.entries else None
        return last.why if isinstance(last, TrajectoryEnd) else None

    @property
    def interrupted(self) -> bool:
        """The last turn is to be gone on with."""
        last = self.entries[-1] if self.entries else None
        return isinstance(last, PolicyEntry) and last.finish == "abort"

    @property
    def unanswered(self) -> bool:
        """The last turn is over, and the environment has not answered yet."""
        return bool(self.entries) and isinstance(self.entries[-1], PolicyEntry) and not self.interrupted

    @property
    def cut(self) -> bool:
        """The last turn ended because it may not be longer."""
        last = self.entries[-1] if self.entries else None
        return isinstance(last, PolicyEntry) and last.finish == "length"

    @property
    def last_words(self) -> Array:
        """[T] int64: what the policy said last, up to now if that turn is not over; empty after an answer."""
        pieces: list[Array] = [NO_IDS]
        for entry in reversed(self.entries):
            if isinstance(entry, ContextEntry):
                break
            if isinstance(entry, PolicyEntry):
                pieces.append(entry.ids)
        return np.concatenate(pieces[::-1])

    @property
    def ids(self) -> Array:
        """[L] int64."""
        return np.concatenate([e.ids for e in self.entries if not isinstance(e, TrajectoryEnd)])

    def rollout(self, weights: Mapping[str, float]) -> Rollout:
        """With the environment's rewards, and each turn as a step. weights: of reward parts, 1 where there is none."""
        token_columns = [_columns(*at) for at in self._with_turns() if len(at[0].ids)]
        columns = {name: np.concatenate([c[name] for c in token_columns]) for name in token_columns[0]}
        total: Counter[str] = Counter()
        for turn, parts in enumerate(self._parts()):
            last = np.flatnonzero(columns["step"] == turn)[-1:]
            columns["step_rewards"][last] += _weighed(parts, weights)
            total.update(parts)
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
        )

    def _with_turns(self) -> list[tuple[ContextEntry | PolicyEntry, int, int]]:
        """Each entry with tokens, the turn that it belongs to, and the state that this one began in."""
        found: list[tuple[ContextEntry | PolicyEntry, int, int]] = []
        turn, anchor = 0, 0
        for entry in self.entries:
            if isinstance(entry, ContextEntry):
                anchor = entry.anchor
                found.append((entry, WITHOUT_STEPS["step"], WITHOUT_STEPS["anchor"]))
            elif isinstance(entry, PolicyEntry):
                found.append((entry, turn, anchor))
                turn += entry.finish != "abort"
        return found

    def _parts(self) -> list[Mapping[str, float]]:
        """Of each turn that was answered."""
        answers = [entry for entry in self.entries[1:] if not isinstance(entry, PolicyEntry)]
        return [entry.parts for entry in answers]


def _weighed(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return float(sum(weights.get(name, 1.0) * part for name, part in parts.items()))


def _columns(entry: ContextEntry | PolicyEntry, turn: int, anchor: int) -> dict[str, Array]:
    size, said = len(entry.ids), isinstance(entry, PolicyEntry)
    return {
        "token_ids": entry.ids,
        "loss_mask": np.full(size, said, np.int8),
        "logprobs": entry.logprobs if isinstance(entry, PolicyEntry) else np.zeros(size, np.float32),
        "versions": entry.versions if isinstance(entry, PolicyEntry) else np.full(size, NO_VERSION, np.int32),
        "step": np.full(size, turn, COLUMNS["step"]),
        "anchor": np.full(size, anchor, COLUMNS["anchor"]),
        "step_rewards": np.zeros(size, COLUMNS["step_rewards"]),
    }


# ---------------------------------------------------------------------- bytes


def _fields(entry: TrajectoryEntry) -> list[Any]:
    """Little-endian arrays."""
    if isinstance(entry, ContextEntry):
        return ["given", entry.ids.astype("<i8").tobytes(), entry.anchor, dict(entry.parts)]
    if isinstance(entry, PolicyEntry):
        arrays = [entry.ids.astype("<i8"), entry.logprobs.astype("<f4"), entry.versions.astype("<i4")]
        return ["said", *(array.tobytes() for array in arrays), entry.finish]
    return ["ended", entry.why, dict(entry.parts)]


def _given(ids: bytes, anchor: int, parts: dict[str, float]) -> ContextEntry:
    return ContextEntry(np.frombuffer(ids, "<i8").astype(np.int64), anchor, parts)


def _said(ids: bytes, logprobs: bytes, versions: bytes, finish: Finish) -> PolicyEntry:
    said = PolicyEntry(
        np.frombuffer(ids, "<i8").astype(np.int64),
        np.frombuffer(logprobs, "<f4").astype(np.float32),
        np.frombuffer(versions, "<i4").astype(np.int32),
        finish,
    )
    if not len(said.ids) == len(said.logprobs) == len(said.versions):
        raise ValueError(f"{len(said.ids)} tokens, {len(said.logprobs)} log-probs")
    return said


READ: Mapping[str, Callable[..., TrajectoryEntry]] = {"given": _given, "said": _said, "ended": TrajectoryEnd}
