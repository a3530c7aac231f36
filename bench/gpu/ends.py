"""The processes of the checks: python -m bench.gpu.ends. Each obeys one line of JSON after another."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from statistics import median
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.config.schema import SyncConfig
from asyncrl.device import accelerator
from asyncrl.errors import DeadlineError
from asyncrl.sync.channels.channel import SOURCE, Channel, Meeting
from asyncrl.sync.channels.nccl_transport import TAKE, make_nccl_channel
from asyncrl.sync.channels.shared_memory import allocated_bytes
from asyncrl.sync.layout.layout import Layout, layout_bytes
from asyncrl.sync.plan.plan import plan
from asyncrl.sync.stream import link
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.stream.subscriber import Subscriber
from asyncrl.sync.tensors.checksum import ROWS, hash_of
from asyncrl.sync.tensors.shards import Shards, TensorBuffer
from bench.process import Talk
from bench.sync.model import generator_layout
from bench.sync.tensors import check, empty_shards, shards_of

WAIT_S = 60.0
STEPS = 30
"""Training steps of a measurement."""

SLACK_BYTES = 256 << 20
"""Of the peak, for the checksum's products and the allocator's blocks."""


def checksum(talk: Talk, said: dict[str, Any]) -> None:
    layout, device = _layout(said), _device(said)
    weights = shards_of(layout)
    here = Shards(layout, weights)
    there = Shards(layout, {name: tensor.to(device) for name, tensor in weights.items()})
    pieces = [piece for source in plan([layout], layout, 64 << 20).sources for piece in source.pieces]
    expected = hash_of(ROWS, pieces, here)
    hash_of(ROWS, pieces, there)  # warms up
    begun = time.perf_counter()
    found = hash_of(ROWS, pieces, there)
    seconds = time.perf_counter() - begun
    if found != expected:
        raise RuntimeError(f"{found:016x} on {device}, {expected:016x} on the CPU")
    there.parts[0].view(-1)[0].neg_()
    if hash_of(ROWS, pieces, there) == expected:
        raise RuntimeError("a sign that flipped changed nothing")
    talk.tell({"gb_per_s": layout_bytes(layout) / seconds / 1e9})


def nccl_alone(talk: Talk, said: dict[str, Any]) -> None:
    device, deadline_s = _device(said), said["deadline_s"]
    ours, theirs = socket.socketpair()
    theirs.sendall(TAKE)  # it says that it takes the byte, and never joins
    begun = time.monotonic()
    try:
        make_nccl_channel(ours, Meeting("alone", SOURCE, "this process", "nobody", device, deadline_s))
    except DeadlineError:
        ended = time.monotonic()
    else:
        raise RuntimeError("NCCL has connected to nobody")
    if int(torch.ones(1024, device=device).sum()) != 1024:
        raise RuntimeError("the GPU does not add up any more")
    talk.tell({"deadline_s": deadline_s, "ended_s": ended - begun, "worked_s": time.monotonic() - ended})
    theirs.close()


def experts(talk: Talk, said: dict[str, Any]) -> None:
    """Forward and backward of one product, every fourth expert without rows."""
    device = _device(said)
    experts, inputs, outputs, rows = (8, 32, 16, 8) if said["tiny"] else (128, 2048, 1536, 256)
    torch.manual_seed(0)
    counts = [0 if expert % 4 == 0 else rows + expert % 3 for expert in range(experts)]
    ends = torch.tensor(counts).cumsum(0).int().to(device)
    x = torch.randn(sum(counts), inputs, dtype=torch.bfloat16, device=device)
    weight = torch.randn(experts, outputs, inputs, dtype=torch.bfloat16, device=device, requires_grad=True)
    gradient = torch.randn(len(x), outputs, dtype=torch.bfloat16, device=device)

    def grouped() -> torch.Tensor:
        return F.grouped_mm(x, weight.mT, offs=ends)

    def looped() -> torch.Tensor:
        return torch.cat([part @ matrix.T for part, matrix in zip(x.split(counts), weight, strict=True)])

    def measured(product: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, float]:
        times = []
        for _ in range(STEPS):
            weight.grad = None
            accelerator.wait_for_device(device)
            begun = time.perf_counter()
            made = product()
            made.backward(gradient)
            accelerator.wait_for_device(device)
            times.append(time.perf_counter() - begun)
        assert weight.grad is not None
        return made.detach(), weight.grad, median(times)

    made, learnt, grouped_s = measured(grouped)
    expected, of_loop, looped_s = measured(looped)
    torch.testing.assert_close(made, expected, atol=0.5, rtol=2e-2)
    torch.testing.assert_close(learnt, of_loop, atol=0.5, rtol=2e-2)
    if bool(learnt[::4].any()):
        raise RuntimeError("experts without rows have a gradient: pytorch#172439")
    talk.tell({"grouped_ms": 1e3 * grouped_s, "looped_ms": 1e3 * looped_s, "ratio": looped_s / grouped_s})


def learner(talk: Talk, said: dict[str, Any]) -> None:
    layout, device = _layout(said), _device(said)
    live = Shards(layout, {name: tensor.to(device) for name, tensor in shards_of(layout).items()})
    config = SyncConfig(backend=said["backend"], delta="never")
    publisher = Publisher(0, 1, live, config, lineage=1)
    talk.tell({"endpoint": publisher.endpoint})
    while (word := talk.hears()) is not None:
        match word:
            case {"publish": version}:
                report = publisher.publish(version)
                talk.tell({"pause_ms": 1e3 * report.pause_s, "pause_floor_ms": 1e3 * report.floor_s})
            case {"train": _}:
                talk.tell(_train(device, publisher, word.get("publish_from")))
            case {"memory": _}:
                expected = (1 + config.snapshots) * layout_bytes(layout) + 2 * config.bucket_bytes
                talk.tell(_memory(device, expected))
    publisher.close()


def generator(talk: Talk, said: dict[str, Any]) -> None:
    layout, device = _layout(said), _device(said, said.get("generator_gpu", 0))
    live = {name: tensor.to(device) for name, tensor in empty_shards(layout).items()}
    staging = TensorBuffer(layout, device).shards
    config = SyncConfig(backend=said["backend"], delta="never")
    if "die_at" in said:
        link.connect = _dying(said["die_at"], link.connect)
    subscriber = Subscriber(said["who"], [said["endpoint"]], staging, config, lineage=1)
    talk.tell("ready")
    while (word := talk.hears()) is not None:
        match word:
            case {"take": version}:
                talk.tell(_take(subscriber, version, layout, live, staging))
            case {"follow": _}:
                talk.tell({"versions": _follow(talk, subscriber, layout, live, staging)})
            case {"memory": _}:
                talk.tell(_memory(device, 2 * layout_bytes(layout) + 2 * config.bucket_bytes))
    subscriber.close()


def _take(
    subscriber: Subscriber, version: int, layout: Layout, live: dict[str, torch.Tensor], staging: Shards
) -> dict[str, float]:
    device = staging.device
    begun = time.monotonic()
    if (newest := subscriber.newest(version - 1, WAIT_S)) != version:
        raise RuntimeError(f"version {version} did not come, but {newest}")
    staged = subscriber.stage(version)
    arrived = time.monotonic()
    torch._foreach_copy_(list(live.values()), staging.parts)
    accelerator.wait_for_device(device)
    flipped = time.monotonic()
    assert staged.checksum is not None
    staged.checksum.check(Shards(layout, live), "the live parameters")
    ended = time.monotonic()
    subscriber.held(version)
    check(layout, {name: tensor.cpu() for name, tensor in live.items()})
    for tensor in (*live.values(), *staging.parts):
        tensor.zero_()
    accelerator.wait_for_device(device)
    return {
        "gb_per_s": layout_bytes(layout) / (ended - begun) / 1e9,
        "transfer_ms": 1e3 * (arrived - begun),
        "flip_ms": 1e3 * (flipped - arrived),
        "verify_ms": 1e3 * (ended - flipped),
    }


def _follow(
    talk: Talk, subscriber: Subscriber, layout: Layout, live: dict[str, torch.Tensor], staging: Shards
) -> int:
    """Take the newest version again and again, up to the last one that the parent names. Returns how many."""
    taken, held = 0, 1
    stop = _Later(talk)
    while stop.version is None or held < stop.version:
        newest = subscriber.newest(held, 0.2)
        if newest is None:
            continue
        try:
            staged = subscriber.stage(newest)
        except link.SnapshotEvictedError:
            continue
        torch._foreach_copy_(list(live.values()), staging.parts)
        assert staged.checksum is not None
        staged.checksum.check(Shards(layout, live), "the live parameters")
        taken, held = taken + 1, newest
    return taken


class _Later:
    """The version in the parent's next line, once that has come."""

    def __init__(self, talk: Talk) -> None:
        self.version: int | None = None
        self._talk = talk
        Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        self.version = self._talk.hears()["stop"]


def _train(device: torch.device, publisher: Publisher, publish_from: int | None) -> dict[str, float]:
    """Steps of matrix products on this thread's stream. publish_from: publishes a version after each step."""
    size = 4096 if accelerator.is_accelerator(device) else 256
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    step_ms, pause_ms, version = [], [0.0], publish_from or 0
    for _ in range(STEPS):
        step_ms.append(_timed(device, lambda: [left @ right for _ in range(20)]))
        if publish_from is not None:  # generators take it while the next step runs
            pause_ms.append(1e3 * publisher.publish(version).pause_s)
            version += 1
    return {"step_ms": median(step_ms), "pause_ms": median(pause_ms), "version": version - 1}


def _timed(device: torch.device, step: Callable[[], object]) -> float:
    """Run the step. Returns its milliseconds by the device's events; on the CPU by the clock."""
    if not accelerator.is_accelerator(device):
        begun = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begun)
    module = torch.get_device_module(device)
    before, after = module.Event(enable_timing=True), module.Event(enable_timing=True)
    before.record()
    step()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def _memory(device: torch.device, expected: int) -> dict[str, float]:
    """On the CPU, where weights are not counted, the memory of the stream alone."""
    if not accelerator.is_accelerator(device):
        return {"peak_bytes": allocated_bytes(), "expected_bytes": expected}
    return {"peak_bytes": accelerator.peak_memory_bytes(device), "expected_bytes": expected + SLACK_BYTES}


def _dying(number: int, opened: Callable[..., Channel]) -> Callable[..., Channel]:
    """Channels that kill this process at their receive of that number."""
    begun = 0

    def counted(receive: Callable[..., Any]) -> Callable[..., Any]:
        def receives(into: Any) -> Any:
            nonlocal begun
            begun += 1
            if begun == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return receive(into)

        return receives

    def connect(*of: Any, **more: Any) -> Channel:
        channel: Any = opened(*of, **more)
        for verb in ("recv", "recv_parts"):
            if hasattr(channel, verb):
                setattr(channel, verb, counted(getattr(channel, verb)))
        return channel

    return connect


def _layout(said: dict[str, Any]) -> Layout:
    return generator_layout(said["millions"], 0, 1)


def _device(said: dict[str, Any], index: int = 0) -> torch.device:
    return accelerator.CPU if said["device"] == "cpu" else accelerator.use_numbered(index)


ROLES = {each.__name__: each for each in (checksum, nccl_alone, experts, learner, generator)}


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    said = talk.hears()
    ROLES[said["role"]](talk, said)


if __name__ == "__main__":
    main()
