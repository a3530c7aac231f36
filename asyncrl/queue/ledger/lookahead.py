"""The limit on how far generators work ahead of the learner, so that the bound is a ceiling and not a target.

A group that waits for the learner grows old. The smallest lead at which the learner hardly waits for groups keeps
the data as fresh as the generators' speed allows, whatever the bound would permit.

    a step that waited more than its share     the lead grows by half a version, at once
    until the share has made up for the wait   it stays: a long wait for one straggler weighs like many short ones
    after that                                 it shrinks by a sixteenth of a version a step
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.queue.protocol.settings import StreamSettings

GROW, SHRINK = 1 / 2, 1 / 16
"""Change of the lead in one step, as a share of a version's groups."""

MOST_DEBT = 1.0
"""Steps spent waiting that are remembered: a slow start, or generators that were gone, are forgiven beyond that."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """groups: beyond those trained, that may be leased · debt: steps waited beyond the share, not made up for yet."""

    groups: int
    debt: float = 0.0


def most_lead(settings: StreamSettings) -> int:
    """The lead that the bound allows a worker that holds the newest version."""
    return (settings.spare_versions + 1) * settings.groups_per_version


def first_lead(settings: StreamSettings) -> Lookahead:
    """Two versions' groups, one in training and one in the making, where the bound allows that."""
    return Lookahead(min(2 * settings.groups_per_version, most_lead(settings)))


def next_lead(lead: Lookahead, waited: float, settings: StreamSettings) -> Lookahead:
    """After a step whose learner waited the share `waited` of its time for groups.

    Never less than one version's groups, or the learner would starve, nor more than the bound allows.

    >>> settings = StreamSettings(16, 3, 1, 64, 1 << 30, 30.0, wait_share=0.125)
    >>> grown = next_lead(Lookahead(32), 0.375, settings); grown
    Lookahead(groups=40, debt=0.25)
    >>> next_lead(grown, 0.0, settings), next_lead(Lookahead(40, 0.125), 0.0, settings)
    (Lookahead(groups=40, debt=0.125), Lookahead(groups=39, debt=0.0))
    """
    assert settings.wait_share is not None
    version = settings.groups_per_version
    debt = min(max(0.0, lead.debt + waited - settings.wait_share), MOST_DEBT)
    groups = lead.groups
    if waited > settings.wait_share:
        groups += math.ceil(GROW * version)
    elif debt == 0:
        groups -= max(1, math.floor(SHRINK * version))
    return Lookahead(min(max(groups, version), most_lead(settings)), debt)
