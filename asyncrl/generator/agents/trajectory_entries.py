"""The entries of a trajectory, the segments that they form, and their bytes.

    ContextEntry     the prompt, later the environment's messages    loss mask 0, NO_VERSION
    PolicyEntry      a turn of the policy, or a piece of one         loss mask 1, its log-probs and versions
    TrajectoryEnd    the reason

    Context Policy Context Policy End           two turns, of one segment
    Context Policy Context(recalled) Policy     two segments: the second turn reads another context
    Context Policy(abort) Policy End            one turn, interrupted once
    Context Policy(abort)                       a turn that is not over (`long_answers.py`)

The pictures of an entry have no pixels in its bytes: its environment shows them again (`agent.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncrl.types import COLUMNS, UNROUTED, Array, Finish, MediaItem, MediaKind, Prompt, Shown

EndReason = Literal["done", "max_turns", "turn_tokens", "total_tokens"]
"""The environment is done · agent.max_turns · generator.max_tokens of one turn · no room for another turn."""

NO_IDS = np.empty(0, np.int64)

NO_LOGPROB = 0.01
"""Above all log-probs, rounding included."""

WIDEST = 1 << 14
"""Most experts of a token, those of all layers together."""


@dataclass(frozen=True, slots=True)
class ContextEntry:
    """ids [.] int64 · anchor: a hash of the state that the next turn begins in · parts: reward of the turn before.

    recalled  None: ids go on with the segment. 0: they begin a segment, and are its whole prompt. k: they begin a
              segment in which the last prompt and the k last turns, with the answers in between, stand before them
    media     what ids show
    messages  JSON, see `RenderedHistory`; empty where no prompt is rendered from messages anew
    """

    ids: Array
    anchor: int
    parts: Mapping[str, float] = field(default_factory=dict)
    recalled: int | None = None
    media: tuple[Shown, ...] = ()
    messages: str = ""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """ids [T] int64, logprobs [T] float32, versions [T] int32. finish "abort": the next entry continues the turn.

    experts  [M, W], see `types.COLUMNS`, of the segment's last M tokens: these T, and those before them whose experts
             no earlier entry has; None: they are not recorded
    """

    ids: Array
    logprobs: Array
    versions: Array
    finish: Finish
    experts: Array | None = None


NO_ROOM = PolicyEntry(NO_IDS, np.empty(0, np.float32), np.empty(0, np.int32), "length")
"""The turn of a policy that has no room for a token."""


@dataclass(frozen=True, slots=True)
class TrajectoryEnd:
    """parts: reward of the last turn."""

    reason: EndReason
    parts: Mapping[str, float] = field(default_factory=dict)


TokenEntry = ContextEntry | PolicyEntry
TrajectoryEntry = TokenEntry | TrajectoryEnd


class TrajectorySegment(NamedTuple):
    """Entries that it repeats from earlier segments, and its own."""

    repeated: list[TokenEntry]
    own: list[TokenEntry]

    @property
    def ids(self) -> Array:
        return np.concatenate([NO_IDS, *(entry.ids for entry in (*self.repeated, *self.own))])

    @property
    def prompt(self) -> Prompt:
        """All its tokens, with what they show."""
        return Prompt(self.ids, media_of((*self.repeated, *self.own)))

    @property
    def recorded(self) -> list[tuple[int, Array]]:
        """The experts of each of its own turns, and the place in the segment behind their last token."""
        end, found = sum(len(entry.ids) for entry in self.repeated), []
        for entry in self.own:
            end += len(entry.ids)
            if isinstance(entry, PolicyEntry) and entry.experts is not None and len(entry.ids):
                found.append((end, entry.experts))
        return found

    def check_experts(self, width: int) -> None:
        """Raises ValueError unless the turns have W experts of each token up to the last of these turns."""
        before = 0
        for end, rows in self.recorded:
            if rows.shape[1] != width or not 0 <= end - len(rows) <= before:
                raise ValueError(
                    f"{rows.shape[1]} experts of {len(rows)} tokens, with {width} of {before} before token {end}"
                )
            before = end

    def experts(self, width: int) -> Array:
        """[., W]: the experts of its tokens, UNROUTED where they are not recorded."""
        experts = np.full((len(self.ids), width), UNROUTED, COLUMNS["experts"])
        for end, rows in self.recorded:
            experts[end - len(rows) : end] = rows
        return experts


def experts_width(segments: Sequence[TrajectorySegment]) -> int | None:
    """W; None: no turn has experts. Allocates nothing. Raises ValueError for experts of other tokens."""
    width = next((rows.shape[1] for segment in segments for _, rows in segment.recorded), None)
    if width is not None:
        if width > WIDEST:
            raise ValueError(f"{width} experts of a token, above {WIDEST}")
        for segment in segments:
            segment.check_experts(width)
    return width


def recorded_experts(segments: Sequence[TrajectorySegment]) -> Array | None:
    """[L, W]: the experts of all tokens; None: no turn has them. Raises ValueError as `experts_width`."""
    width = experts_width(segments)
    return None if width is None else np.concatenate([each.experts(width) for each in segments])


def segments_of(entries: Sequence[TrajectoryEntry]) -> list[TrajectorySegment]:
    prompt: list[TokenEntry] = []
    exchanges: list[list[TokenEntry]] = []  # turns behind the prompt, each with the answer to it
    segments = [TrajectorySegment([], [])]
    before: TrajectoryEntry | None = None
    for entry in entries:
        if isinstance(entry, TrajectoryEnd):
            break
        if isinstance(entry, ContextEntry) and entry.recalled == 0:
            prompt, exchanges = [], []
            segments.append(TrajectorySegment([], []))
        elif isinstance(entry, ContextEntry) and entry.recalled:
            latest = [each for exchange in exchanges[-entry.recalled :] for each in exchange]
            segments.append(TrajectorySegment([*prompt, *latest], []))
        if isinstance(entry, PolicyEntry) and isinstance(before, ContextEntry):
            exchanges.append([])
        (exchanges[-1] if exchanges else prompt).append(entry)
        segments[-1].own.append(entry)
        before = entry
    return segments


def media_of(entries: Iterable[TokenEntry]) -> tuple[Shown, ...]:
    """The pictures that the tokens of these entries show, one after another."""
    found: list[Shown] = []
    start = 0
    for entry in entries:
        if isinstance(entry, ContextEntry):
            found += [shown.moved(start) for shown in entry.media]
        start += len(entry.ids)
    return tuple(found)


# ---- bytes: little-endian arrays


def entry_fields(entry: TrajectoryEntry) -> list[Any]:
    if isinstance(entry, ContextEntry):
        given = ["given", entry.ids.astype("<i8").tobytes(), entry.anchor, dict(entry.parts)]
        more = [entry.recalled, [_media_fields(shown) for shown in entry.media], entry.messages]
        while more and not more[-1] and more[-1] != 0:
            more.pop()
        return [*given, *more]
    if isinstance(entry, PolicyEntry):
        arrays = [entry.ids.astype("<i8"), entry.logprobs.astype("<f4"), entry.versions.astype("<i4")]
        said = ["said", *(array.tobytes() for array in arrays), entry.finish]
        routed = entry.experts
        return said if routed is None else [*said, routed.shape[1], routed.astype("<i2").tobytes()]
    return ["ended", entry.reason, dict(entry.parts)]


def _media_fields(shown: Shown) -> list[Any]:
    return [shown.start, shown.item.kind, shown.item.tokens, shown.item.digest]


def _context_entry(
    ids: bytes,
    anchor: int,
    parts: dict[str, float],
    recalled: int | None = None,
    media: Sequence[tuple[int, MediaKind, int, bytes]] = (),
    messages: str = "",
) -> ContextEntry:
    if (recalled is not None and not (type(recalled) is int and recalled >= 0)) or type(messages) is not str:
        raise ValueError(f"{recalled!r} turns that are recalled, messages of type {type(messages).__name__}")
    shown = tuple(Shown(start, MediaItem(kind, tokens, {}, digest)) for start, kind, tokens, digest in media)
    return ContextEntry(np.frombuffer(ids, "<i8").astype(np.int64), anchor, parts, recalled, shown, messages)


def _policy_entry(
    ids: bytes,
    logprobs: bytes,
    versions: bytes,
    finish: Finish,
    width: int | None = None,
    experts: bytes = b"",
) -> PolicyEntry:
    routed = (
        None if width is None else np.frombuffer(experts, "<i2").astype(COLUMNS["experts"]).reshape(-1, width)
    )
    entry = PolicyEntry(
        np.frombuffer(ids, "<i8").astype(np.int64),
        np.frombuffer(logprobs, "<f4").astype(np.float32),
        np.frombuffer(versions, "<i4").astype(np.int32),
        finish,
        routed,
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
