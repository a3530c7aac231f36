"""Steps between versions of a rank's shards: routed by any plan, kept within their bytes, replayed by laggards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from delta_cases import stepped
from fake_streams import DEFAULT, fake_streams
from hypothesis import given, settings
from hypothesis import strategies as st
from local_channel import local_channels
from sharding import full_tensors, local_tensors, same_bits, sharded_models

import asyncrl.sync.delta.delta_chain as delta_chain
import asyncrl.sync.delta.delta_stream as delta_stream
import asyncrl.sync.delta.records as delta_records
from asyncrl.errors import DeadlineError, WireError
from asyncrl.sync.delta.delta import Changes
from asyncrl.sync.delta.delta_chain import DeltaChain, DeltaStep, Messages, make_step, route
from asyncrl.sync.delta.delta_stream import (
    Deltas,
    announce,
    announced,
    deltas_bytes,
    receive_deltas,
    send_deltas,
)
from asyncrl.sync.delta.device_delta import Pair
from asyncrl.sync.layout.layout import Box, Layout, ParamLayout, whole_layout
from asyncrl.sync.plan.plan import SourcePlan, plan
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.tensors.bucket import Buffers
from asyncrl.sync.tensors.shards import Shards

CPU = torch.device("cpu")
LAYOUT = whole_layout({"w": ((40, 10), "bfloat16"), "norm": ((10,), "float32")})


def take(deltas: Deltas, source: SourcePlan, staged: Shards) -> list[int]:
    """Send them through a channel; returns the buckets in the order in which they became whole."""
    there, here = local_channels(f"rank {source.rank}", "generator")
    arrived: list[int] = []
    announce(deltas, there, lambda: 1.0)
    send_deltas(deltas, there, lambda: 1.0, lambda: None)
    sizes = announced(source, here, lambda: 1.0)
    assert sizes is not None
    receive_deltas(sizes, source, staged, here, Buffers(source, staged, CPU), lambda: 1.0, arrived.append)
    return arrived


@settings(max_examples=40)
@given(
    sharded_models(), st.integers(16, 300), st.sampled_from([0.0, 0.02, 0.3]), st.booleans(), st.booleans()
)
def test_a_destination_follows_versions_through_deltas_from_any_sharding(
    model: tuple, size: int, share: float, strided: bool, deflated: bool
) -> None:
    sources, destination = model
    versions = [full_tensors(destination)]
    for seed in (1, 2):
        versions.append(stepped(versions[-1], share, seed))
    ranks = [[Shards(layout, local_tensors(layout, full)) for full in versions] for layout in sources]
    staged = Shards(destination, local_tensors(destination, versions[0], strided=strided))
    for source in plan(sources, destination, size).sources:
        rank, layout = ranks[source.rank], sources[source.rank]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delta_chain, "TILE_BYTES", 64)
            steps = [make_step(v, v + 1, rank[v], rank[v + 1], lambda: True) for v in (0, 1)]
        deltas = [routed(step, source, layout, deflated) for step in steps if step is not None]
        assert len(deltas) == 2
        assert share or not deltas_bytes(deltas)
        assert take(deltas, source, staged) == list(range(len(source.buckets)))
    expected = Shards(destination, local_tensors(destination, versions[-1]))
    assert all(map(same_bits, staged.parts, expected.parts))


def routed(step: DeltaStep, source: SourcePlan, layout: Layout, deflated: bool) -> Messages:
    messages = route(step, source, layout, deflated=deflated, in_time=lambda: True)
    assert messages is not None
    return messages


def test_whole_tiles_are_joined_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 3 to 19 of tiles of four rows: those at both ends alone are read and cut."""
    old = full_tensors(LAYOUT)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["w"].view(torch.int16).view(-1)[::7] += 1
    needed = {"w": ParamLayout((40, 10), "bfloat16", (Box((3, 0), (16, 10)),))}
    monkeypatch.setattr(delta_chain, "TILE_BYTES", 80)
    step = make_step(0, 1, Shards(LAYOUT, old), Shards(LAYOUT, new), lambda: True)
    assert step is not None
    read: list[torch.Tensor] = []

    def spied(record: torch.Tensor, tensors: Any) -> Iterator[Changes]:
        read.append(record)
        return delta_records.read(record, tensors)

    monkeypatch.setattr(delta_chain, "read", spied)
    (source,) = plan([LAYOUT], needed, 1 << 20).sources
    deltas = [routed(step, source, LAYOUT, deflated=False)]
    assert all(record is step.tiles["w"][tile].record for record, tile in zip(read, (0, 4), strict=True))
    staged = Shards(needed, {"w": old["w"][3:19].clone()})
    take(deltas, source, staged)
    assert same_bits(staged.parts[0], new["w"][3:19])


def whole_plan() -> SourcePlan:
    (source,) = plan([LAYOUT], LAYOUT, 1 << 20).sources
    return source


class Learner:
    """Snapshots of a rank's shards by version, and a chain over them."""

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.full = {0: full_tensors(LAYOUT)}
        for version in range(1, 8):
            self.full[version] = stepped(self.full[version - 1], 0.02, version)
        self.held: set[int] = set()
        self.asked: list[int] = []
        self.chain = DeltaChain("learner rank 0", LAYOUT, most_bytes, self.holding)

    def holding(self, version: int) -> Shards | None:
        self.asked.append(version)
        return Shards(LAYOUT, self.full[version]) if version in self.held else None

    def publish(self, version: int, before: int | None = None) -> None:
        self.held = {version} | {v for v in self.held if v == (version - 1 if before is None else before)}
        self.chain.published(version)

    def find(self, base: int | None, version: int, source: SourcePlan | None = None) -> Deltas | None:
        return self.chain.find(base, version, source or whole_plan(), 10.0, deflated=False)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learner]]:
    made: list[Learner] = []

    def make(**more: int) -> Learner:
        made.append(Learner(**more))
        return made[-1]

    yield make
    for learner in made:
        learner.chain.close()


def test_a_laggard_replays_the_chain(learners: Callable[..., Learner]) -> None:
    learner = learners()
    assert learner.find(None, 0) is None, "somebody asks: from now on there are steps"
    for version in range(3, 8):
        learner.publish(version)
        assert learner.find(version, version) == [], "already there"
        learner.find(version - 1, version)
    deltas = learner.find(3, 7)
    assert deltas is not None
    assert len(deltas) == 4
    staged = Shards(LAYOUT, {name: tensor.clone() for name, tensor in learner.full[3].items()})
    take(deltas, whole_plan(), staged)
    assert all(map(same_bits, staged.parts, Shards(LAYOUT, learner.full[7]).parts))
    assert learner.find(2, 7) is None, "older than the chain"
    assert learner.find(8, 7) is None
    assert learner.find(4, 6) is not None, "any stretch of it"


def test_a_longer_way_than_a_receiver_takes_is_none(
    learners: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is then sent in full; the receiver would refuse the announcement."""
    monkeypatch.setattr(delta_chain, "MOST_STEPS", 3)
    learner = learners()
    learner.find(None, 0)
    for version in range(5):
        learner.publish(version)
        learner.find(version, version)
    longest = learner.find(1, 4)
    assert longest is not None
    assert len(longest) == 3
    assert learner.find(0, 4) is None


@pytest.mark.parametrize("steps", [delta_stream.MOST_STEPS, delta_stream.MOST_STEPS + 1])
def test_both_ends_take_the_same_way_for_the_longest(steps: int) -> None:
    assert delta_chain.MOST_STEPS == delta_stream.MOST_STEPS
    nothing = [[torch.empty(0, dtype=torch.uint8)]] * steps
    there, here = local_channels("learner rank 0", "generator-0")
    announce(nothing, there, lambda: 1.0)
    if steps > delta_stream.MOST_STEPS:
        with pytest.raises(WireError, match="a delta of 1025 steps; at most 1024"):
            announced(whole_plan(), here, lambda: 1.0)
    else:
        assert announced(whole_plan(), here, lambda: 1.0) == [[0]] * steps


def test_versions_may_be_skipped(learners: Callable[..., Learner]) -> None:
    learner = learners()
    learner.find(None, 0)
    learner.publish(1)
    learner.publish(5, before=1)
    deltas = learner.find(1, 5)
    assert deltas is not None
    assert len(deltas) == 1
    assert learner.find(4, 5) is None


def test_nothing_is_compared_before_somebody_asks(learners: Callable[..., Learner]) -> None:
    learner = learners()
    learner.publish(0)
    learner.publish(1)
    assert learner.find(0, 1) is None
    assert learner.asked == []


def test_replicas_share_the_messages_of_their_plan(learners: Callable[..., Learner]) -> None:
    learner = learners()
    learner.find(None, 0)
    learner.publish(0)
    learner.publish(1)
    first, again = learner.find(0, 1), learner.find(0, 1)
    assert first is not None
    assert again is not None
    assert all(a is b for a, b in zip(first[0], again[0], strict=True))
    (columns,) = plan(
        [LAYOUT], {"w": ParamLayout((40, 10), "bfloat16", (Box((0, 3), (40, 4)),))}, 1 << 20
    ).sources
    other = learner.find(0, 1, columns)
    assert other is not None
    assert 0 < deltas_bytes(other) < deltas_bytes(first)


def test_slow_links_get_deflated_messages_of_their_own(learners: Callable[..., Learner]) -> None:
    learner = learners()
    learner.full[1] = stepped(learner.full[0], 0.2, seed=1)
    learner.find(None, 0)
    learner.publish(0)
    learner.publish(1)
    plain = learner.chain.find(0, 1, whole_plan(), 10.0, deflated=False)
    held = learner.chain.bytes
    deflated, again = (learner.chain.find(0, 1, whole_plan(), 10.0, deflated=True) for _ in range(2))
    assert plain is not None
    assert deflated is not None
    assert learner.chain.bytes == held + deltas_bytes(deflated)
    assert again is not None
    assert deflated[0][0] is again[0][0]
    assert 0 < deflated[0][0].numel() < plain[0][0].numel()
    staged = Shards(LAYOUT, {name: tensor.clone() for name, tensor in learner.full[0].items()})
    take(deflated, whole_plan(), staged)
    assert all(map(same_bits, staged.parts, Shards(LAYOUT, learner.full[1]).parts))


def test_messages_that_are_not_made_in_time_are_none(
    learners: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link waits no longer, neither for its own nor while those of another are made."""
    learner = learners()
    learner.find(None, 0)
    learner.publish(0)
    learner.publish(1)
    learner.find(1, 1)
    begun, go = threading.Event(), threading.Event()

    def slowly(*step: Any, in_time: Callable[[], bool], **more: Any) -> Messages | None:
        begun.set()
        assert go.wait(10.0)
        return real(*step, in_time=lambda: False, **more)

    real = delta_chain.route
    monkeypatch.setattr(delta_chain, "route", slowly)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(learner.find, 0, 1)
        assert begun.wait(10.0)
        assert learner.chain.find(0, 1, whole_plan(), 0.01, deflated=True) is None
        go.set()
        assert late.result(10.0) is None
    monkeypatch.setattr(delta_chain, "route", real)
    assert learner.find(0, 1) is not None
    left = iter([True, False])
    step = make_step(0, 1, *(Shards(LAYOUT, learner.full[version]) for version in (0, 1)), lambda: True)
    (source,) = plan([LAYOUT], LAYOUT, 128).sources
    assert step is not None
    assert route(step, source, LAYOUT, deflated=False, in_time=lambda: next(left)) is None


def test_messages_that_nobody_wants_any_more_are_not_made(learners: Callable[..., Learner]) -> None:
    learner = learners()
    learner.find(None, 0)
    learner.publish(0)
    learner.publish(1)

    def unwanted() -> None:
        raise SnapshotEvictedError("gone")

    with pytest.raises(SnapshotEvictedError):
        learner.chain.find(0, 1, whole_plan(), 10.0, deflated=True, still_wanted=unwanted)
    assert learner.find(0, 1) is not None


def test_changes_that_are_no_less_than_the_version_are_none(learners: Callable[..., Learner]) -> None:
    learner = learners()
    learner.full[1] = stepped(learner.full[0], 1.0, seed=1)
    learner.find(None, 0)
    learner.publish(0)
    learner.publish(1)
    assert learner.find(1, 1) == []
    assert learner.find(0, 1) is None


def test_the_oldest_steps_go_first_when_the_memory_is_spent(learners: Callable[..., Learner]) -> None:
    learner = learners()
    learner.find(None, 0)
    for version in range(4):
        learner.publish(version)
        learner.find(version, version)
    each = learner.chain.bytes // 3
    small = learners(most_bytes=2 * each + each // 2)
    small.find(None, 0)
    for version in range(4):
        small.publish(version)
        small.find(version, version)
    assert small.chain.bytes <= 2 * each + each // 2
    assert small.find(0, 3) is None
    assert small.find(2, 3) is not None


def test_a_base_that_is_overwritten_meanwhile_makes_no_step(
    learners: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learners()
    learner.find(None, 0)
    learner.publish(0)

    def overwritten(pairs: Sequence[Pair]) -> list[Changes]:
        learner.held.discard(0)
        return find(pairs)

    find = delta_chain.all_changes
    monkeypatch.setattr(delta_chain, "all_changes", overwritten)
    learner.publish(1)
    assert learner.find(0, 1) is None
    assert learner.chain.bytes == 0


def test_who_asks_early_waits_for_the_step_that_is_being_made(
    learners: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learners()
    learner.find(None, 0)
    learner.publish(0)
    go = threading.Event()

    def slowly(pairs: Sequence[Pair]) -> list[Changes]:
        assert go.wait(10.0)
        return find(pairs)

    find = delta_chain.all_changes
    monkeypatch.setattr(delta_chain, "all_changes", slowly)
    learner.publish(1)
    assert learner.chain.find(0, 1, whole_plan(), 0.0, deflated=False) is None
    go.set()
    assert learner.find(0, 1) is not None


def test_changes_are_not_found_on_the_stream_of_training(
    learners: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = fake_streams(monkeypatch)
    monkeypatch.setattr(delta_chain, "all_changes", module.logging("find", delta_chain.all_changes))
    learner = learners()
    learner.find(None, 0)
    for version in range(3):
        learner.publish(version)
        learner.find(version - 1, version)
    (stream,) = set(module.on("find"))
    assert stream != DEFAULT


def test_a_step_that_fails_costs_only_itself(
    learners: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learners()
    learner.find(None, 0)
    learner.publish(0)
    with monkeypatch.context() as patch:
        patch.setattr(delta_chain, "all_changes", None)
        learner.publish(1)
        assert learner.find(0, 1) is None
    learner.publish(2)
    assert learner.find(1, 2) is not None


def sent(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).view(torch.uint8)


@pytest.mark.parametrize(
    "messages",
    [[sent(-2)], [sent(5000)], [sent(1), sent(-8)], [sent(1), sent(1 << 40)], [sent(2), sent(8, 1 << 62)]],
)
def test_an_announcement_that_cannot_be_is_refused(messages: list[torch.Tensor]) -> None:
    there, here = local_channels("learner rank 0", "generator-0")
    for message in messages:
        there.send(message)
    with pytest.raises(WireError):
        announced(whole_plan(), here, lambda: 1.0)


def test_full_buckets_are_announced_too() -> None:
    there, here = local_channels("learner rank 0", "generator-0")
    announce(None, there, lambda: 1.0)
    assert announced(whole_plan(), here, lambda: 1.0) is None
    with pytest.raises(DeadlineError, match="generator-0 waited"):
        announced(whole_plan(), here, lambda: 0.01)
