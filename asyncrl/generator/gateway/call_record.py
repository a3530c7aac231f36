"""The turns that a program has requested in one rollout, and how they become segments.

    the prompt ─▸ turn 0 ─▸ turn 1 ─▸ turn 4        one segment: each request continues the reply before it
                       └──▸ turn 3                  a request that continues a reply which another one has continued: a
                                                    segment whose context is all that the policy had read and written
    another prompt ─▸ turn 2                        a sub-agent, a history that the program has rewritten

A turn is trained on once, after exactly the tokens that the engine had for it. `packed` is the record as bytes. A
program that is started again, elsewhere, is given the recorded turn for each conversation that it repeats.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgpack
import numpy as np

from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.generator.agents.trajectory_entries import (
    NO_IDS,
    ContextEntry,
    EndReason,
    PolicyEntry,
    TrajectoryEnd,
    TrajectorySegment,
    experts_width,
)
from asyncrl.types import Array, Rollout


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn.

    parent    the turn whose reply the conversation continues; -1: its prompt was rendered whole
    asked     digest of the conversation that the program sent · answered: of that and the reply
    entries   the context behind the parent's tokens, then the policy's tokens; experts from the parent's last token on
    """

    parent: int
    asked: bytes
    answered: bytes
    entries: Trajectory


class CallRecord:
    """The turns of one rollout in the order in which they ended. A turn of an earlier program counts once it is given
    again, or once a turn that continues it counts.

    ended  why the rollout is over
    """

    interrupted = False
    """Turns are recorded whole."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.turns: list[RecordedTurn] = []
        self.ended: EndReason | None = None
        self.packed = bytearray()
        self._parts: Mapping[str, float] = {}
        self._given: list[int] = []
        self._answered: dict[bytes, int] = {}

    @staticmethod
    def unpack(packed: bytes) -> CallRecord:
        """Raises ValueError for bytes that hold no record."""
        record = CallRecord()
        try:
            for kind, *fields in msgpack.Unpacker(io.BytesIO(packed)):
                if kind == "turn":
                    parent, asked, answered, entries = fields
                    record.add(RecordedTurn(parent, asked, answered, Trajectory.unpack(entries, begun=True)))
                elif kind == "end":
                    record.end(*fields)
            continued = {turn.parent for turn in record.turns}
            experts_width([record.line(i) for i in range(len(record.turns)) if i not in continued])
            if record.packed != packed:
                raise ValueError("cut off, or of another form")
        except (KeyError, IndexError, TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"no record of calls: {error!r}") from error
        return record

    def begin_again(self) -> None:
        """Begin with a new program, which was given no turn yet."""
        self._given.clear()

    def add(self, turn: RecordedTurn) -> None:
        """Add a turn that is given to the program."""
        if not -1 <= turn.parent < len(self.turns) or not _whole(turn):
            raise ValueError(f"turn {len(self.turns)} continues turn {turn.parent}, or is not whole")
        self._answered[turn.answered] = len(self.turns)
        self._given.append(len(self.turns))
        self.turns.append(turn)
        self.packed += msgpack.packb(
            ["turn", turn.parent, turn.asked, turn.answered, bytes(turn.entries.packed)]
        )

    def end(self, reason: EndReason, parts: Mapping[str, float], given: Sequence[int] | None = None) -> None:
        """The rollout is over. parts: of its reward · given: the turns that the program was given, in order"""
        self._given = list(self._given if given is None else given)
        if not self._given or not {*self._given} <= {*range(len(self.turns))}:
            raise ValueError(f"it ends with {self._given} of {len(self.turns)} turns")
        self.ended, self._parts = reason, parts
        self.packed += msgpack.packb(["end", reason, dict(parts), self._given])

    def again(self, asked: bytes) -> int | None:
        """Give the first turn of this conversation that this program was not given yet. None: there is none."""
        fitting = (i for i, turn in enumerate(self.turns) if turn.asked == asked and i not in self._given)
        if (index := next(fitting, None)) is not None:
            self._given.append(index)
        return index

    def last_given(self, asked: bytes) -> int | None:
        """The last turn of this conversation that the program was given."""
        return next((index for index in reversed(self._given) if self.turns[index].asked == asked), None)

    def continued(self, digests: Sequence[bytes]) -> tuple[int, int]:
        """(turn, count): the last recorded turn whose reply stands in this conversation, and the number of messages
        up to that reply; (-1, 0) without such a turn. digests: as `Conversation.digests`."""
        for count in range(len(digests) - 1, 0, -1):
            if (index := self._answered.get(digests[count])) is not None:
                return index, count
        return -1, 0

    def line(self, index: int) -> TrajectorySegment:
        """All that the policy has read and written at the end of a turn; nothing for -1."""
        entries = (entry for each in _line(self.turns, index) for entry in self.turns[each].entries.entries)
        return TrajectorySegment([], [entry for entry in entries if not isinstance(entry, TrajectoryEnd)])

    def within(self, tokens: int) -> bool:
        """Whether the policy has read and written at most so many tokens at the end of each turn."""
        lengths = [0]  # the last one is that of no turn
        for turn in self.turns:
            lengths.insert(-1, lengths[turn.parent] + turn.entries.length)
        return max(lengths) <= tokens

    @property
    def given(self) -> int:
        """Turns that the program was given."""
        return len(self._given)

    @property
    def left_out(self) -> int:
        """Turns that do not count: the program did not repeat itself."""
        return len(self.turns) - len(_counted(self.turns, self._given))

    @property
    def length(self) -> int:
        return sum(turn.entries.length for turn in self.turns)

    @property
    def ids(self) -> Array:
        """[.] int64: the tokens of all entries."""
        return np.concatenate([NO_IDS, *(turn.entries.ids for turn in self.turns)])

    @property
    def last(self) -> RecordedTurn:
        """The turn that the program was given last."""
        return self.turns[self._given[-1]]

    @property
    def last_words(self) -> Array:
        return self.last.entries.last_words

    def segments(self) -> list[list[int]]:
        """The turns of each segment; the segment of the last turn is the last one."""
        open_at: dict[int, list[int]] = {}  # by their last turns
        for index in _counted(self.turns, self._given):
            begun = open_at.pop(self.turns[index].parent, [])
            open_at[index] = [*begun, index]
        return list(open_at.values())

    def rollout(self, weights: Mapping[str, float]) -> Rollout:
        """All segments as one rollout. weights: as those of `Trajectory.rollout`."""
        assert self.ended is not None
        segments = [self._segment(turns) for turns in self.segments()]
        segments[-1].add(TrajectoryEnd(self.ended, self._parts))
        lines = [self.line(turns[-1]) for turns in self.segments()]
        width = experts_width(lines)
        rollouts = []
        for segment, line in zip(segments, lines, strict=True):
            rollout = segment.rollout(weights)
            experts = {} if width is None else {"experts": line.experts(width)}
            rollouts.append(replace(rollout, columns={**rollout.columns, **experts}))
        return Rollout.from_segments(rollouts)

    def _segment(self, turns: Sequence[int]) -> Trajectory:
        """These turns as one segment, without experts. The tokens that the first of them continues are context here."""
        repeated = self.line(self.turns[turns[0]].parent)
        context, *others = self.line(turns[-1]).own[len(repeated.own) :]
        assert isinstance(context, ContextEntry)
        whole = Trajectory([ContextEntry(np.concatenate([repeated.ids, context.ids]), context.anchor)])
        for entry in others:
            whole.add(replace(entry, experts=None) if isinstance(entry, PolicyEntry) else entry)
        return whole


def _line(turns: Sequence[RecordedTurn], index: int) -> list[int]:
    """A turn and those that it continues, the oldest first."""
    line: list[int] = []
    while index >= 0:
        line.append(index)
        index = turns[index].parent
    return line[::-1]


def _counted(turns: Sequence[RecordedTurn], given: Sequence[int]) -> list[int]:
    """The turns that the program was given, each behind those that it continues."""
    return list(dict.fromkeys(each for index in given for each in _line(turns, index)))


def _whole(turn: RecordedTurn) -> bool:
    entries = turn.entries.entries
    if not turn.entries.unanswered or not isinstance(entries[0], ContextEntry):
        return False
    opened = turn.parent >= 0 or len(entries[0].ids) > 0
    return opened and all(isinstance(entry, PolicyEntry) for entry in entries[1:])
