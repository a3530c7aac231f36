"""One rollout as it grows, entry by entry; existing entries never change.

    ContextEntry     the prompt, later the environment's messages    loss mask 0, NO_VERSION
    PolicyEntry      a turn of the policy, or a piece of one         loss mask 1, its log-probs and versions
    TrajectoryEnd    the reason

    Context Policy Context Policy End           two turns
    Context Policy(abort) Policy End            one turn, interrupted once
    Context Policy(abort)                       a turn that is not over (`long_answers.py`)

`packed` is the whole trajectory as bytes, from which another process continues. The queue keeps those of a task:

    a turn ends ─▸ changed ─▸ all trajectories of the task ─▸ queue     one message at a time; changes during a send
                                                                        go into the next message
    leased again ─▸ the trajectories as they were in the last message

Axes:  L tokens of the rollout
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack
import numpy as np

from asyncrl.errors import AsyncRLError
from asyncrl.types import COLUMNS, NO_VERSION, WITHOUT_STEPS, Array, Finish, Rollout

log = logging.getLogger(__name__)

EndReason = Literal["done", "max_turns", "turn_tokens", "total_tokens"]
"""The environment is done · agent.max_turns · generator.max_tokens of one turn · no room for another turn."""

NO_IDS = np.empty(0, np.int64)

LARGEST_VOCABULARY = 1 << 31

NO_LOGPROB = 0.01
"""Above all log-probs, rounding included."""


@dataclass(frozen=True, slots=True)
class ContextEntry:
    """ids [.] int64 · anchor: a hash of the state that the next turn begins in · parts: reward of the turn before."""

    ids: Array
    anchor: int
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """ids [T] int64, logprobs [T] float32, versions [T] int32. finish "abort": the next entry continues the turn."""

    ids: Array
    logprobs: Array
    versions: Array
    finish: Finish


@dataclass(frozen=True, slots=True)
class TrajectoryEnd:
    """parts: reward of the last turn."""

    reason: EndReason
    parts: Mapping[str, float] = field(default_factory=dict)


TrajectoryEntry = ContextEntry | PolicyEntry | TrajectoryEnd


class Trajectory:
    """Entries in order. `packed` grows with them. length: tokens so far · turns: finished ones."""

    def __init__(self) -> None:
        self.clear()

    @staticmethod
    def unpack(packed: bytes) -> Trajectory:
        """Raises ValueError for bytes that hold no trajectory."""
        trajectory = Trajectory()
        try:
            for kind, *fields in msgpack.Unpacker(io.BytesIO(packed)):
                trajectory.add(ENTRY_READERS[kind](*fields))
            if trajectory.packed != packed:
                raise ValueError("cut off")
        except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"no trajectory: {error!r}") from error
        return trajectory

    def clear(self) -> None:
        self.entries: list[TrajectoryEntry] = []
        self.packed = bytearray()
        self.length = self.turns = 0

    def keep_first(self, count: int) -> None:
        """Remove all entries behind the first `count`."""
        kept = self.entries[:count]
        self.clear()
        for entry in kept:
            self.add(entry)

    def add(self, entry: TrajectoryEntry) -> None:
        self.entries.append(entry)
        self.packed += msgpack.packb(_fields(entry))
        if not isinstance(entry, TrajectoryEnd):
            self.length += len(entry.ids)
        if isinstance(entry, PolicyEntry) and entry.finish != "abort":
            self.turns += 1

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
        """[L] int64."""
        return np.concatenate([NO_IDS, *(e.ids for e in self.entries if not isinstance(e, TrajectoryEnd))])

    def rollout(self, weights: Mapping[str, float]) -> Rollout:
        """With the environment's rewards, and each turn as a step. weights: of reward parts, 1 where there is none."""
        token_columns = [_columns(*at) for at in self._with_turns() if len(at[0].ids)]
        columns = {name: np.concatenate([c[name] for c in token_columns]) for name in token_columns[0]}
        total: Counter[str] = Counter()
        # Every entry behind the prompt that is not the policy's has the reward of the turn before it.
        rewards = [entry.parts for entry in self.entries[1:] if not isinstance(entry, PolicyEntry)]
        for turn, parts in enumerate(rewards):
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
        """Each entry with tokens, the index of its turn, and the anchor of the state that the turn began in."""
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


def _weighed(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return float(sum(weights.get(name, 1.0) * part for name, part in parts.items()))


def _columns(entry: ContextEntry | PolicyEntry, turn: int, anchor: int) -> dict[str, Array]:
    size, sampled = len(entry.ids), isinstance(entry, PolicyEntry)
    return {
        "token_ids": entry.ids,
        "loss_mask": np.full(size, sampled, np.int8),
        "logprobs": entry.logprobs if isinstance(entry, PolicyEntry) else np.zeros(size, np.float32),
        "versions": entry.versions if isinstance(entry, PolicyEntry) else np.full(size, NO_VERSION, np.int32),
        "step": np.full(size, turn, COLUMNS["step"]),
        "anchor": np.full(size, anchor, COLUMNS["anchor"]),
        "step_rewards": np.zeros(size, COLUMNS["step_rewards"]),
    }


# ---- bytes: little-endian arrays


def _fields(entry: TrajectoryEntry) -> list[Any]:
    if isinstance(entry, ContextEntry):
        return ["given", entry.ids.astype("<i8").tobytes(), entry.anchor, dict(entry.parts)]
    if isinstance(entry, PolicyEntry):
        arrays = [entry.ids.astype("<i8"), entry.logprobs.astype("<f4"), entry.versions.astype("<i4")]
        return ["said", *(array.tobytes() for array in arrays), entry.finish]
    return ["ended", entry.reason, dict(entry.parts)]


def _context_entry(ids: bytes, anchor: int, parts: dict[str, float]) -> ContextEntry:
    return ContextEntry(np.frombuffer(ids, "<i8").astype(np.int64), anchor, parts)


def _policy_entry(ids: bytes, logprobs: bytes, versions: bytes, finish: Finish) -> PolicyEntry:
    entry = PolicyEntry(
        np.frombuffer(ids, "<i8").astype(np.int64),
        np.frombuffer(logprobs, "<f4").astype(np.float32),
        np.frombuffer(versions, "<i4").astype(np.int32),
        finish,
    )
    if not len(entry.ids) == len(entry.logprobs) == len(entry.versions):
        raise ValueError(f"{len(entry.ids)} tokens, {len(entry.logprobs)} log-probs")
    if not ((entry.logprobs > -np.inf) & (entry.logprobs < NO_LOGPROB)).all() or (entry.versions < 0).any():
        raise ValueError("log-probs or versions that are none")
    return entry


ENTRY_READERS: Mapping[str, Callable[..., TrajectoryEntry]] = {
    "given": _context_entry,
    "said": _policy_entry,
    "ended": TrajectoryEnd,
}


# ---- the finished turns of a leased task, which the queue keeps for its next lease: `QueueClient.progress`

FORMAT = 1
"""The format of the frames: a header, then the bytes of each trajectory."""

Send = Callable[[Sequence[bytes]], Awaitable[None]]
"""Sends frames to the queue."""


class TaskProgress:
    """The `count` trajectories of one task.

    kept  frames that came with the lease; unreadable ones, and those with tokens outside of the vocabulary, are
          replaced by new trajectories
    send  None sends nothing
    sent  tokens of the trajectories in the last message
    """

    def __init__(
        self,
        count: int,
        kept: Sequence[bytes] = (),
        send: Send | None = None,
        vocabulary: int = LARGEST_VOCABULARY,
    ) -> None:
        self.trajectories = _unpack(kept, count, vocabulary)
        self._send, self._newer = send, False
        self.sent = self._tokens
        self._sending: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """Send the trajectories, now or after the message under way."""
        self._newer = True
        if self._send is not None and self._sending is None:
            self._sending = asyncio.create_task(self._send_all(self._send))

    def grown(self, every: int) -> None:
        """As `changed`, once as many tokens are new as all turns under way have in `every` steps of the engine."""
        under_way = sum(trajectory.interrupted for trajectory in self.trajectories)
        if self._tokens - self.sent >= every * max(1, under_way):
            self.changed()

    @property
    def _tokens(self) -> int:
        return sum(trajectory.length for trajectory in self.trajectories)

    def close(self) -> None:
        """Cancel the message under way, and send none after it."""
        self._send = None
        if self._sending is not None:
            self._sending.cancel()

    def frames(self) -> list[bytes]:
        header = msgpack.packb({"format": FORMAT, "trajectories": len(self.trajectories)})
        return [header, *(bytes(trajectory.packed) for trajectory in self.trajectories)]

    async def _send_all(self, send: Send) -> None:
        """A failure (a lost lease, a queue that is gone) ends the sending; the worker's other calls report it."""
        try:
            while self._newer:
                self._newer, self.sent = False, self._tokens
                await send(self.frames())
        except AsyncRLError as error:
            self._send = None
            log.info("what is finished of a task is not kept any more: %s", error)
        self._sending = None


def _unpack(kept: Sequence[bytes], count: int, vocabulary: int) -> list[Trajectory]:
    try:
        if kept:
            header, *packed = kept
            if msgpack.unpackb(header) == {"format": FORMAT, "trajectories": count} and len(packed) == count:
                unpacked = [Trajectory.unpack(one) for one in packed]
                if not all(_known(one.ids, vocabulary) for one in unpacked):
                    raise ValueError(f"tokens outside of the vocabulary of {vocabulary}")
                return unpacked
            raise ValueError("other trajectories than those of this config")
    except (ValueError, msgpack.UnpackException) as error:
        log.warning("what was finished of a task cannot be used: %s", error)
    return [Trajectory() for _ in range(count)]


def _known(ids: Array, vocabulary: int) -> bool:
    return bool(((ids >= 0) & (ids < vocabulary)).all())
