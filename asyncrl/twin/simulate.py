"""A run as discrete events, on the ledger that the queue itself has.

          lease ◂── admission, depth ──┐
   ┌──────────────┐ commit   ┌─────────┴────────┐ claim    ┌─────────────────────┐
   │ Decoder, one │────────▸ │ Ledger (the real │────────▸ │ claims ▸ compute ▸  │
   │ a generator  │ reward_s │ one, no process) │ ◂────────│ version_s ▸ publish │
   └──────▴───────┘          └──────────────────┘ trained  └─────────┬───────────┘
          └── fetch_s beside the decoding, then flip_s without it ◂──┘

One heap has all events: the end of a sequence, a commit, the end of a computation, a publication, a version that has
arrived, a flip that is over. A generator that gets no lease is parked by the version that it holds: of those that hold
the same, none gets one if the first does not.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.generator.sample_limit import SampleLimit
from asyncrl.queue.ledger import generator_commands
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.twin.brokers import Brokers, SentGroup
from asyncrl.twin.decoding import Decoder
from asyncrl.twin.outcome import Setup, Simulated, bound
from asyncrl.twin.times import Lengths, StageTimes
from asyncrl.twin.training import NO_LIMIT, WAIT_GROUPS, SimulatedLearner
from asyncrl.types import TRAIN

WARM_UP = 3
"""Versions that are left out of an outcome, beside those that the staleness bound lets pass."""

ROLLOUTS, GRAINS = 200_000, 64
"""From so many rollouts on, the ends of sequences are rounded to the mean length over GRAINS."""

NEVER_S = 1e15


def simulate(
    setup: Setup,
    times: StageTimes,
    versions: int = 30,
    seed: int = 0,
    fetch_s: Sequence[float] | None = None,
    warm_up: int | None = None,
) -> Simulated:
    """Simulate `versions` versions after the warm-up. The same arguments give the same outcome.

    fetch_s: seconds to each generator, by number; None: `sync.fetch_s` to all · warm_up: versions; None: until the
    pools run as they will
    """
    left_out = WARM_UP + setup.max_staleness if warm_up is None else warm_up
    return Run(setup, times, left_out, versions, seed, fetch_s).outcome()


class _Draws:
    """Tokens of each rollout of a group, by ordinal: alike for all setups of one seed."""

    BLOCK = 1024

    def __init__(self, lengths: Lengths, group_size: int, seed: int) -> None:
        self._table, self._group_size = lengths.table(), group_size
        self._random = np.random.default_rng(seed)
        self._drawn: list[list[float]] = []
        self.mean = lengths.mean()

    def group(self, ordinal: int) -> list[float]:
        while ordinal >= len(self._drawn):
            shares = self._random.random((self.BLOCK, self._group_size))
            points = np.linspace(0.0, 1.0, len(self._table))
            tokens = np.interp(shares, points, self._table)
            self._drawn += np.maximum(1.0, np.rint(tokens)).tolist()
        return self._drawn[ordinal]


class Run:
    def __init__(
        self,
        setup: Setup,
        times: StageTimes,
        warm_up: int,
        versions: int,
        seed: int,
        fetch_s: Sequence[float] | None,
    ) -> None:
        self.setup, self.times = setup, times
        self._warm_up, self._last = warm_up, warm_up + versions
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.now = 0.0
        self._draws = _Draws(times.lengths, setup.group_size, seed)
        of_all = times.sync.switch_s if setup.colocated else times.sync.fetch_s
        self._fetch_s = fetch_s or [of_all] * setup.generators
        self.ledger = Ledger()
        self.ledger.open(_settings(setup), None)
        self.brokers = Brokers(times.queue, setup)
        self._measured = _Measured()
        self._open_generators()
        self._learner = SimulatedLearner(self)

    def _open_generators(self) -> None:
        setup = self.setup
        rollouts = (self._last + setup.max_staleness) * setup.groups * setup.group_size
        grain = self._draws.mean / GRAINS if rollouts > ROLLOUTS else 0.0
        self._decoders = [Decoder(setup.slots, self.times.generation, grain) for _ in range(setup.generators)]
        self._limit = SampleLimit(setup.slots, setup.group_size)
        self._held = [0] * setup.generators
        self._coming = [0] * setup.generators  # samples that are leased and not yet in the engine
        self._fetching = [False] * setup.generators
        self._wake = [0] * setup.generators  # the number of the one event of the engine that counts
        self._leases: dict[int, tuple[int, int]] = {}  # ordinal -> epoch, version held
        self._parked: dict[int, dict[int, None]] = {}  # version held -> generators, in order

    # ------------------------------------------------------------------ the events

    def outcome(self) -> Simulated:
        self._feed()
        for number in range(self.setup.generators):
            self._ask(number)
        while self.ledger.state.steps.version < self._last:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        return self._measured.outcome(self.setup, self.times, self.brokers)

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), action, arguments))

    def once(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """`after`; and now where it takes no time, so that other events of this moment stay behind it."""
        if seconds:
            self.after(seconds, action, *arguments)
        else:
            action(*arguments)

    # ------------------------------------------------------------------ generators

    def _feed(self) -> None:
        if room := self.ledger.room():
            self.ledger.submit(self.ledger.state.tasks.next, room)

    def _ask(self, number: int) -> bool:
        """Lease as many groups as the generator has room for. Returns whether it got all."""
        most = self._limit.groups_wanted(self._decoders[number].samples + self._coming[number])
        if not most:
            return True
        held = self._held[number]
        request = rq.LeaseRequest(stream=TRAIN, held=held, lineage=0, most=most)
        grants = generator_commands.lease(self.ledger, request, str(number), self.now)
        if grants:
            self._feed()
            self._coming[number] += self.setup.group_size * len(grants)
            for grant in grants:
                self._leases[grant.ordinal] = (grant.epoch, held)
            answered = self.times.sync.queue_s + self.brokers.lease(self.now, len(grants))
            self.after(answered, self._begin, number, [grant.ordinal for grant in grants])
        if len(grants) < most:
            self._parked.setdefault(held, {})[number] = None
        return len(grants) == most

    def admit(self) -> None:
        """Admission or the room in the queue has changed: those that are parked ask again."""
        for held in list(self._parked):
            parked = self._parked[held]
            while parked:
                number = next(iter(parked))
                del parked[number]
                if not self._ask(number):
                    break
            if not self._parked[held]:
                del self._parked[held]

    def _begin(self, number: int, ordinals: Sequence[int]) -> None:
        self._advance(number)
        decoder = self._decoders[number]
        for ordinal in ordinals:
            decoder.add(ordinal, self._draws.group(ordinal))
        self._coming[number] -= self.setup.group_size * len(ordinals)
        self._schedule(number)

    def _advance(self, number: int) -> None:
        for ordinal in self._decoders[number].advance(self.now):
            self.after(self.times.generation.reward_s + self.times.sync.queue_s, self._send, ordinal)

    def _schedule(self, number: int) -> None:
        self._wake[number] += 1
        end = self._decoders[number].next_end
        if end < math.inf:
            self.after(end - self.now, self._sequence_ends, number, self._wake[number])

    def _sequence_ends(self, number: int, wake: int) -> None:
        if wake != self._wake[number]:
            return  # others have joined since, and it ends later
        self._advance(number)
        self._schedule(number)
        if number not in self._parked.get(self._held[number], ()):
            self._ask(number)

    def _send(self, ordinal: int) -> None:
        """A group is on its way to the ledger: its payload first, if that goes elsewhere."""
        group = self.sent_group(ordinal)
        self.once(self.brokers.store(self.now, group), self._reach, group)

    def _reach(self, group: SentGroup) -> None:
        self.once(self.brokers.commit(self.now, group), self._commit, group)

    def _commit(self, group: SentGroup) -> None:
        epoch, held = self._leases.pop(group.ordinal)
        request = rq.CommitRequest(
            stream=TRAIN,
            ordinal=group.ordinal,
            epoch=epoch,
            tokens=round(group.tokens),
            start_version=held,
            nbytes=0,
            digest=0,
        )
        generator_commands.commit(self.ledger, request)
        self._learner.claim()

    # ------------------------------------------------------------------ weights

    def publish(self, version: int) -> None:
        """The learner has published: generators fetch it, unless they are at an earlier one."""
        self._measured.published[version] = self.now
        for number, fetching in enumerate(self._fetching):
            if not fetching:
                self._fetch(number, version)

    def _fetch(self, number: int, version: int) -> None:
        self._fetching[number] = True
        self.after(self._fetch_s[number], self._flip, number, version)

    def _flip(self, number: int, version: int) -> None:
        self._advance(number)
        self._decoders[number].stall(self.times.sync.flip_s)
        self._schedule(number)
        self.after(self.times.sync.flip_s, self._hold, number, version)

    def _hold(self, number: int, version: int) -> None:
        self._parked.get(self._held[number], {}).pop(number, None)
        self._held[number] = version
        self._measured.lags.append(self.now - self._measured.published[version])
        newest = self.ledger.state.steps.version
        self._fetching[number] = False
        if newest > version:
            self._fetch(number, newest)
        self._ask(number)

    # ------------------------------------------------------------------ for the learner

    def policy_tokens(self, ordinal: int) -> float:
        return sum(self._draws.group(ordinal))

    def sent_group(self, ordinal: int) -> SentGroup:
        prompts = self.setup.group_size * self.times.lengths.prompt
        return SentGroup(ordinal, self.policy_tokens(ordinal) + prompts)

    def measure(
        self, learner: Mapping[str, float], trained: Sequence[tuple[int, float]], version: int
    ) -> None:
        """A version is trained. trained: age and tokens of each group"""
        measured = self._measured
        if version > self._warm_up:
            measured.staleness.update(age for age, _ in trained)
            measured.tokens += sum(tokens for _, tokens in trained)
        if version in (self._warm_up, self._last):
            seconds = Counter[str]()
            for number, decoder in enumerate(self._decoders):
                self._advance(number)
                self._schedule(number)
                seconds.update(decoder.seconds)
            measured.marks.append((self.now, seconds, Counter(learner), self.brokers.seconds))


class _Measured:
    """marks: time, seconds of all generators, of the learner and of each broker, where the measurement begins and
    ends"""

    def __init__(self) -> None:
        self.marks: list[tuple[float, Counter[str], Counter[str], tuple[float, ...]]] = []
        self.staleness, self.tokens = Counter[int](), 0.0
        self.lags: list[float] = []
        self.published: dict[int, float] = {}

    def outcome(self, setup: Setup, times: StageTimes, brokers: Brokers) -> Simulated:
        start = (0.0, Counter[str](), Counter[str](), (0.0,) * len(brokers.seconds))  # without a warm-up
        (begun, *before, asked_before), (ended, *now, asked) = [start, *self.marks][-2:]
        versions = sum(self.staleness.values()) // setup.groups
        generators, learner = (
            {name: (last[name] - first[name]) / count for name in last}
            for first, last, count in zip(before, now, (setup.generators, 1), strict=True)
        )
        learn_s = sum(s for name, s in learner.items() if name != WAIT_GROUPS) / versions
        most = bound(setup, times, self.tokens / versions, learn_s)
        lag_s, seconds = sum(self.lags) / max(1, len(self.lags)), ended - begun
        busy = brokers.busy(asked_before, asked, seconds)
        return Simulated(
            setup, versions, seconds, self.tokens, generators, learner, self.staleness, lag_s, most, busy
        )


def _settings(setup: Setup) -> StreamSettings:
    """One rank in the ledger's eyes: `busiest` shares a claim out, which takes less time for thousands of ranks."""
    return StreamSettings(
        groups_per_version=setup.groups,
        max_staleness=setup.max_staleness,
        window=setup.window_groups,
        depth=setup.depth_groups,
        max_bytes=NO_LIMIT,
        lease_s=NEVER_S,
        retain=False,
    )
