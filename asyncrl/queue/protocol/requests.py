"""The requests to the broker: one record for each verb.

    client ── builds the record ──▸ packed ──▸ wire ──▸ unpacked: types and limits ──▸ handler ──▸ ledger command

A record travels as a msgpack map under its verb and is passed on whole. The annotation of a field is its check, so that
a new field is written here, in the client's method, which makes its value, and in the ledger's event, which keeps it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from asyncrl.errors import RefusedError, WireError
from asyncrl.queue.protocol.settings import MAX_COUNT, MAX_NAMES, Names, StreamSettings, check_names
from asyncrl.types import Version

MAX_TEXT = 4096
MAX_WAIT_S = 3600.0
MAX_ITEMS = 1 << 17
"""Limits of one field: characters, seconds to wait, entries of a list or map."""

TRACE_BYTES = 1 << 16
"""Rows of a trace in one request."""

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
WaitSeconds = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]
Ordinals = Annotated[tuple[int, ...], Meta(max_length=MAX_ITEMS)]
LeaseKeys = Annotated[tuple[tuple[int, int], ...], Meta(max_length=MAX_ITEMS // 2)]
"""(ordinal, epoch) of each lease."""


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """wait_s: how long the broker may let the request wait before it must reply."""

    verb: ClassVar[str]
    ends_with_run: ClassVar[bool] = False
    """Whether a closed run refuses it."""
    of_any_run: ClassVar[bool] = False
    """Whether the sender need not know the run."""

    wait_s: WaitSeconds = 0.0

    @property
    def entries(self) -> int:
        """Entries of its lists, if it may have many and may wait."""
        return 0


class StreamRequest(Request, frozen=True, kw_only=True):
    ends_with_run = True
    stream: Text


class PayloadRequest(StreamRequest, frozen=True, kw_only=True):
    """nbytes: length of the payload frames behind the request."""

    nbytes: int


# ---------------------------------------------------------------------- every client


class HelloRequest(Request, frozen=True, kw_only=True):
    verb = "hello"


class GoodbyeRequest(Request, frozen=True, kw_only=True):
    verb = "goodbye"
    of_any_run = True


class PostRequest(Request, frozen=True, kw_only=True):
    """value: packed; it is stored and returned as it is."""

    verb = "post"
    key: Text
    value: bytes


class LookupRequest(Request, frozen=True, kw_only=True):
    verb = "lookup"
    key: Text


class RenewRequest(Request, frozen=True, kw_only=True):
    """leases: by stream. stats: packed telemetry of the worker."""

    verb = "renew"
    leases: Annotated[dict[str, LeaseKeys], Meta(max_length=MAX_NAMES)]
    stats: bytes


class TraceRequest(Request, frozen=True, kw_only=True):
    """Wants the queue's time, and rows kept. process: the name of the trace · rows: of it, whole lines"""

    verb = "trace"
    process: Text
    rows: Annotated[bytes, Meta(max_length=TRACE_BYTES)]


class GiveBackRequest(StreamRequest, frozen=True, kw_only=True):
    verb = "give_back"
    ends_with_run = False
    leases: LeaseKeys


# ---------------------------------------------------------------------- the operator


class StatusRequest(Request, frozen=True, kw_only=True):
    verb = "status"
    of_any_run = True


class PeekRequest(StreamRequest, frozen=True, kw_only=True):
    verb = "peek"
    ends_with_run = False
    ordinal: int


class DrainRequest(StreamRequest, frozen=True, kw_only=True):
    verb = "drain"


class FinishRequest(Request, frozen=True, kw_only=True):
    verb = "finish"
    reason: Text


# ---------------------------------------------------------------------- the task feeder


class RoomRequest(StreamRequest, frozen=True, kw_only=True):
    verb = "room"


class SubmitRequest(StreamRequest, frozen=True, kw_only=True):
    """tasks: (ordinal, packed task) with consecutive ordinals."""

    verb = "submit"
    tasks: Annotated[tuple[tuple[int, bytes], ...], Meta(max_length=MAX_ITEMS)]
    min_version: Version

    @property
    def entries(self) -> int:
        return len(self.tasks)

    def __post_init__(self) -> None:
        first = self.tasks[0][0] if self.tasks else 0
        if first < 0 or any(ordinal != first + at for at, (ordinal, _) in enumerate(self.tasks)):
            raise ValueError("tasks must have consecutive ordinals")


class ExhaustRequest(StreamRequest, frozen=True, kw_only=True):
    """at: the first ordinal without a task."""

    verb = "exhaust"
    at: int


class ScoresRequest(StreamRequest, frozen=True, kw_only=True):
    """Wants the scores that groups came with, from number `since` on; those before are forgotten."""

    verb = "scores"
    since: int


# ---------------------------------------------------------------------- generators


class LeaseRequest(StreamRequest, frozen=True, kw_only=True):
    """held, lineage: of the weights that the worker holds. most: number of tasks."""

    verb = "lease"
    held: Version
    lineage: int
    most: int


class ProgressRequest(PayloadRequest, frozen=True, kw_only=True):
    verb = "progress"
    ordinal: int
    epoch: int


class CommitRequest(PayloadRequest, frozen=True, kw_only=True):
    """A finished group.

    columns  the columns that it has beyond those of every group
    squares  sum of the squared lengths of its segments
    digest   xxh3-64 of the payload
    score    mean reward of its rollouts, for a curriculum; None: nobody asks for it
    """

    verb = "commit"
    ordinal: int
    epoch: int
    tokens: Annotated[int, Meta(lt=MAX_COUNT)]
    start_version: Version
    digest: int
    columns: Names = ()
    squares: int = 0
    score: float | None = None

    def __post_init__(self) -> None:
        check_names("columns", self.columns)


class DropRequest(StreamRequest, frozen=True, kw_only=True):
    """score: of a finished group, as in `CommitRequest`"""

    verb = "drop"
    ordinal: int
    epoch: int
    reason: Text
    score: float | None = None


# ---------------------------------------------------------------------- stages


class StageLeaseRequest(StreamRequest, frozen=True, kw_only=True):
    verb = "stage_lease"
    stage: Text
    most: int


class StageCommitRequest(PayloadRequest, frozen=True, kw_only=True):
    """version: the policy version that the columns depend on."""

    verb = "stage_commit"
    stage: Text
    ordinal: int
    epoch: int
    version: Version
    digest: int


class StageDropRequest(StreamRequest, frozen=True, kw_only=True):
    verb = "stage_drop"
    stage: Text
    ordinal: int
    epoch: int
    reason: Text


# ---------------------------------------------------------------------- the learner


class OpenRequest(StreamRequest, frozen=True, kw_only=True):
    """snapshot: packed frontier to rewind to. call: the learner's number for this opening, by which a repetition is
    recognised."""

    verb = "open"
    settings: StreamSettings
    snapshot: bytes | None = None
    call: int | None = None


class LearnerRequest(StreamRequest, frozen=True, kw_only=True):
    """learner_epoch: returned by the opening; after another opening it is fenced."""

    learner_epoch: int


class StepRequest(LearnerRequest, frozen=True, kw_only=True):
    step: int


class ClaimRequest(StepRequest, frozen=True, kw_only=True):
    """Rank `rank` requests its share of the `index`-th claim of the step.

    whole    True: the longest run of ready groups in ordinal order within `max_tokens` a rank, once no further group
             fits or can come; False: the groups that are ready now
    attempt  as in the replies to the step's earlier claims
    received groups of the share that earlier replies have brought: one reply may not have room for all
    ahead    the first claim may come while the step before runs, once no group can be added to it
    """

    verb = "claim"
    index: int
    rank: int
    max_tokens: int
    whole: bool
    attempt: int | None = None
    received: Annotated[int, Meta(ge=0)] = 0
    ahead: bool = False


class TrainedRequest(StepRequest, frozen=True, kw_only=True):
    """waited: share of the step's time that the learner waited for groups."""

    verb = "trained"
    waited: float | None = None


class RejectRequest(StepRequest, frozen=True, kw_only=True):
    verb = "reject"
    reason: Text


class AbandonRequest(StepRequest, frozen=True, kw_only=True):
    verb = "abandon"
    attempt: int
    dropped: Ordinals = ()
    reason: Text


class CheckpointedRequest(LearnerRequest, frozen=True, kw_only=True):
    verb = "checkpointed"
    version: Version


class CollectRequest(LearnerRequest, frozen=True, kw_only=True):
    """got, corrupt: ordinals that the last reply brought, readable and unreadable."""

    verb = "collect"
    got: Ordinals = ()
    corrupt: Ordinals = ()

    @property
    def entries(self) -> int:
        return len(self.got) + len(self.corrupt)


class SnapshotRequest(LearnerRequest, frozen=True, kw_only=True):
    verb = "snapshot"


# ---------------------------------------------------------------------- bytes


def _verbs(cls: type[Request]) -> dict[str, type[Request]]:
    own = {cls.verb: cls} if hasattr(cls, "verb") else {}
    return own | {verb: each for sub in cls.__subclasses__() for verb, each in _verbs(sub).items()}


VERBS = _verbs(Request)
DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    verb: msgspec.msgpack.Decoder(cls) for verb, cls in VERBS.items()
}


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError)

NAMED_BYTES = 1 << 14
"""A larger request is not unpacked without its schema, to name the value that is wrong."""


def pack_request(request: Request) -> bytes:
    return msgspec.msgpack.encode(request)


def unpack_request(verb: str, packed: bytes, frames: Sequence[Any] = ()) -> Request:
    """The record of a request with its payload frames.

    Raises:
        RefusedError: 'unknown_op', there is no such verb.
        WireError: a field is missing, of another type or beyond its limit, or the payload is not `nbytes` long.
    """
    decoder = DECODERS.get(verb)
    if decoder is None:
        raise RefusedError("unknown_op", verb[:64])
    try:
        request: Request = decoder.decode(packed)
    except UNREADABLE as error:
        raise WireError(f"{verb}: {error}{_value_at_fault(packed, str(error))}") from error
    if isinstance(request, PayloadRequest) and request.nbytes != sum(map(len, frames)):
        received = sum(map(len, frames))
        raise WireError(f"{verb}: {received} payload bytes, {request.nbytes} announced")
    if frames and not isinstance(request, PayloadRequest):
        raise WireError(f"{verb}: {len(frames)} payload frames, it has none")
    return request


def _value_at_fault(packed: bytes, rule: str) -> str:
    """The value that breaks the rule, for the error.

    >>> _value_at_fault(msgspec.msgpack.encode({"most": "x"}), "Expected `int`, got `str` - at `$.most`")
    ", which is 'x'"
    """
    key = re.search(r"at `\$\.(\w+)", rule)
    if len(packed) > NAMED_BYTES:
        return ""
    try:
        return f", which is {msgspec.msgpack.decode(packed)[key[1]]!r:.100}" if key else ""
    except (*UNREADABLE, KeyError, TypeError):
        return ""
