"""Just-in-time leases: data is as fresh as the learner's patience allows, in a simulated run without a real second."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_driver import DrivenLedger as Ledger

from asyncrl.queue.ledger.lookahead import Lookahead, first_lead, next_lead
from asyncrl.queue.protocol.settings import StreamSettings

B, ETA, WAIT_SHARE = 16, 8, 0.05
STREAM = StreamSettings(
    groups_per_version=B, max_staleness=ETA, window=B + 1, depth=(ETA + 1) * B, max_bytes=1 << 40, lease_s=1e9
)
STEP_S = 16.0
"""Seconds of work in one step of the simulated learner."""

FLIP_S = 1.0
"""From the publication of a version until the generator holds it."""


@dataclass
class Simulation:
    """One generator and one learner. make_s: mean seconds of a group, of which the generator makes `slots` at once.

    ages: versions between the oldest token of each group and the step that trained it · waits: (waited, all) seconds
    of each step
    """

    stream: StreamSettings
    make_s: float
    slots: int
    seed: int = 0
    ages: list[float] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.ledger.open(self.stream, None)
        self.random = random.Random(self.seed)
        self.making: list[tuple[float, int, int, int]] = []  # (done at, ordinal, epoch, version)
        self.flips: list[tuple[float, int]] = [(0.0, 0)]
        self.now = 0.0

    def run(self, steps: int) -> Simulation:
        for step in range(steps):
            began, waited, trained, index = self.now, 0.0, 0, 0
            while trained < B:
                claim = self.ledger.claim(1, step, index, 0, 1 << 30, False)
                if claim is None:
                    waited += self.pass_time(self.next_group())
                    continue
                starts = [
                    self.ledger.state.tasks.records[ordinal].start_version for ordinal in claim.ordinals
                ]
                self.ages += [step - start for start in starts]
                trained, index = trained + len(starts), index + 1
                self.pass_time(self.now + len(starts) * STEP_S / B)
            self.waits.append((waited, self.now - began))
            self.ledger.trained(1, step, waited / (self.now - began))
            self.flips.append((self.now + FLIP_S, step + 1))
            self.generate()
        return self

    def next_group(self) -> float:
        self.generate()
        return self.making[0][0] if self.making else self.now + FLIP_S

    def pass_time(self, until: float) -> float:
        """The generator works on meanwhile. Returns how much time passed."""
        since = self.now
        while self.making and self.making[0][0] <= until:
            self.now, ordinal, epoch, version = heapq.heappop(self.making)
            self.ledger.commit(ordinal, epoch, 1, 1, version, ordinal)
            self.generate()
        self.now = max(self.now, until)
        return self.now - since

    def generate(self) -> None:
        if room := self.ledger.room():
            self.ledger.submit(self.ledger.state.tasks.next, room)
        held = max(version for at, version in self.flips if at <= self.now)
        for grant in self.ledger.lease("w", held, 0, self.slots - len(self.making), self.now):
            done = self.now + self.make_s * self.random.lognormvariate(-0.18, 0.6)  # mean 1, a long tail
            heapq.heappush(self.making, (done, grant.ordinal, grant.epoch, held))

    def mean_age(self, after: int = 30) -> float:
        ages = self.ages[after * B :]
        return sum(ages) / len(ages)

    def wait_share(self, after: int = 30) -> float:
        waits = self.waits[after:]
        return sum(waited for waited, _ in waits) / sum(whole for _, whole in waits)


@pytest.mark.parametrize(("make_s", "age"), [(1.0, 1.1), (4.0, 1.6), (12.0, 3.0)])
def test_a_fast_generator_does_not_fill_the_pipe(make_s: float, age: float) -> None:
    """Without pacing all data is almost as old as the bound allows; one group takes a share of the step's 16 s."""
    free = Simulation(STREAM, make_s, slots=64).run(300)
    paced = Simulation(replace(STREAM, wait_share=WAIT_SHARE), make_s, slots=64).run(300)
    assert free.mean_age() > 0.8 * ETA
    assert paced.mean_age() < age
    assert paced.wait_share() < WAIT_SHARE
    assert max(paced.ages) <= ETA


def test_a_generator_that_is_too_slow_is_not_held_back() -> None:
    """It gets all the lead that the bound allows, and the learner waits no longer than without."""
    free = Simulation(STREAM, 80.0, 32).run(100)
    paced = Simulation(replace(STREAM, wait_share=WAIT_SHARE), 80.0, 32).run(100)
    assert paced.wait_share() == pytest.approx(free.wait_share(), abs=0.02)
    assert paced.wait_share() > 0.5


@given(st.integers(1, 40), st.integers(0, 5), st.floats(0, 1), st.floats(0.01, 0.9), st.integers(1, 400))
def test_the_lead_holds_one_version_and_stays_under_the_bound(
    groups: int, staleness: int, waited: float, share: float, lead: int
) -> None:
    stream = StreamSettings(groups, staleness, 1, 1 << 20, 1, 1.0, wait_share=share)
    most = (staleness + 1) * groups
    after = next_lead(Lookahead(lead), waited, stream)
    assert groups <= after.groups <= most
    assert groups <= first_lead(stream).groups <= most
    if groups <= lead <= most:
        assert after.groups >= lead if waited > share else after.groups <= lead


def test_a_wait_is_made_up_for_before_the_lead_shrinks() -> None:
    """A step of 0.5 under a share of 0.125 is four shares: the lead grows by 8 and stays for two steps more."""
    stream = replace(STREAM, wait_share=0.125)
    lead, seen = Lookahead(32), []
    for waited in (0.5, 0.0, 0.0, 0.0, 0.0):
        lead = next_lead(lead, waited, stream)
        seen.append((lead.groups, lead.debt))
    assert seen == [(40, 0.375), (40, 0.25), (40, 0.125), (39, 0.0), (38, 0.0)]


def test_without_a_share_nothing_is_paced() -> None:
    ledger = Ledger()
    ledger.open(STREAM, None)
    ledger.submit(0, 1000)
    assert len(ledger.lease("w", 0, 0, 1000, 0.0)) == STREAM.spare_versions * B + B
