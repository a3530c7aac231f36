"""A version as changes to an older one, bucket by bucket over a channel.

    ──▸ how many steps, or -1: the full buckets follow
    ──▸ the bytes of each message                        steps × buckets
    ──▸ bucket 0: step 1, step 2, …   bucket 1: …        a record for each piece; nothing changed: no message

The receiver adds step after step to its staging memory. Both ends know the plan, so records name nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncrl.errors import WireError
from asyncrl.sync.channels.channel import Channel, Transfer
from asyncrl.sync.delta.delta import add
from asyncrl.sync.delta.records import most_bytes, read
from asyncrl.sync.plan.plan import Bucket, SourcePlan
from asyncrl.sync.tensors.bucket import Buffers
from asyncrl.sync.tensors.shards import Shards, flat_bytes

FULL = -1

MOST_STEPS = 1024

Deltas = Sequence[Sequence[torch.Tensor]]
"""The steps from one version to another; of each, one message [bytes] uint8 per bucket of a plan."""


def deltas_bytes(deltas: Deltas) -> int:
    return sum(message.numel() for messages in deltas for message in messages)


def announce(deltas: Deltas | None, channel: Channel, seconds_left: Callable[[], float]) -> None:
    """Announce the deltas that follow; None: the full buckets do."""
    steps = FULL if deltas is None else len(deltas)
    sizes = [message.numel() for messages in deltas or () for message in messages]
    for numbers in filter(None, ([steps], sizes)):
        channel.send(flat_bytes(torch.tensor(numbers)).to(channel.device)).wait(seconds_left())


def announced(
    source: SourcePlan, channel: Channel, seconds_left: Callable[[], float]
) -> list[list[int]] | None:
    """The bytes of the messages that follow, by step and bucket; None: the full buckets do.

    Raises WireError for an impossible announcement.
    """
    (steps,) = _numbers(1, channel, seconds_left)
    if steps == FULL:
        return None
    if not 0 <= steps <= MOST_STEPS:
        raise WireError(f"a delta of {steps} steps; at most {MOST_STEPS}")
    buckets = len(source.buckets)
    flat = _numbers(steps * buckets, channel, seconds_left) if steps * buckets else []
    sizes = [flat[step * buckets :][:buckets] for step in range(steps)]
    for index, bucket in enumerate(source.buckets):
        most = sum(most_bytes(piece.bytes) for piece in bucket.pieces)
        if not all(0 <= step[index] <= most for step in sizes):
            raise WireError(
                f"bucket {index} has changes of {[step[index] for step in sizes]} bytes; at most {most}"
            )
    return sizes


def send_deltas(
    deltas: Deltas, channel: Channel, seconds_left: Callable[[], float], moved: Callable[[], None]
) -> None:
    """Send the announced messages. `moved()` is called after each message and may raise to end the transfer."""
    flying: list[Transfer] = []
    for messages in zip(*deltas, strict=True):
        for message in filter(torch.Tensor.numel, messages):
            if len(flying) == 2:
                flying.pop(0).wait(seconds_left())
                moved()
            flying.append(channel.send(message.to(channel.device)))
    for transfer in flying:
        transfer.wait(seconds_left())
        moved()


def receive_deltas(
    sizes: Sequence[Sequence[int]],
    source: SourcePlan,
    staged: Shards,
    channel: Channel,
    buffers: Buffers,
    seconds_left: Callable[[], float],
    arrived: Callable[[int], None] = lambda index: None,
) -> None:
    """Make the announced steps in `staged`; `arrived(index)` is called when a bucket has made all of them.

    Raises DeadlineError and WeightSyncError of the channel, WireError for records of other pieces.
    """
    coming = [size for step in zip(*sizes, strict=True) for size in step if size]
    biggest = max(coming, default=0)

    def begin(number: int) -> tuple[torch.Tensor, Transfer]:
        message = buffers.take(number, biggest)[: coming[number]]
        return message, channel.recv(message)

    flying = [begin(number) for number in range(min(2, len(coming)))]
    done = 0
    for index, bucket in enumerate(source.buckets):
        for size in (step[index] for step in sizes):
            if not size:
                continue
            message, transfer = flying.pop(0)
            transfer.wait(seconds_left())
            _make_step(message, bucket, staged)
            done += 1
            if done + 1 < len(coming):
                flying.append(begin(done + 1))
        arrived(index)


def _make_step(message: torch.Tensor, bucket: Bucket, staged: Shards) -> None:
    targets = [staged.view(piece.name, piece.box) for piece in bucket.pieces]
    kinds = [(target.numel(), target.element_size()) for target in targets]
    for target, changes in zip(targets, read(message.cpu(), kinds), strict=True):
        add(target, changes)


def _numbers(count: int, channel: Channel, seconds_left: Callable[[], float]) -> list[int]:
    into = torch.empty(8 * count, dtype=torch.uint8, device=channel.device)
    channel.recv(into).wait(seconds_left())
    numbers: list[int] = into.cpu().view(torch.int64).tolist()
    return numbers
