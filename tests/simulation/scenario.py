"""What a seed stands for: the settings of a run, its processes, and the faults that will befall it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from asyncrl.queue.protocol.settings import StageSettings, StreamSettings

LEASE_S = 10.0
HEDGE_S = 2.0
"""Less than some generations take."""

SCORER = StageSettings("scorer", adds=("score",))
CRITIC = StageSettings("critic", needs=("score",), adds=("values",))

FAULTS = (
    *("worker", "worker", "scorer", "learner", "learner", "learner", "run"),
    *("broker", "broker", "broker", "broker", "broker"),
    *("drop", "drop", "swallow", "stall", "freeze", "drain", "checkpoint"),
)
CRASH_POINTS = ("read", "decided", "shelved", "written", "written", "sent", "compacted")


@dataclass(frozen=True, slots=True)
class Fault:
    """after: so many messages · where: a crash point of the broker · pick: which process or connection."""

    after: int
    kind: str
    where: str
    pick: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """scorers: processes of the stages, in turns · bad, corrupt: ordinals that cannot be done, cannot be read
    durable, spill: how payloads are kept · files: in real files
    checkpoint_first: the learner saves its start, so that a rewind may go back to there
    refused: share of steps that are not finite · progress: share of tasks of which a part is handed in
    """

    seed: int
    stream: StreamSettings
    tasks: int
    versions: int
    workers: int
    scorers: int
    durable: bool
    spill: bool
    whole: bool
    checkpoint_every: int
    checkpoint_first: bool
    generation_s: float
    step_s: float
    latency_s: float
    max_tokens: int
    progress: float
    refused: float
    bad: frozenset[int]
    corrupt: frozenset[int]
    evaluations: bool
    files: bool
    faults: tuple[Fault, ...]


def scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    stream, tasks = _stream(rng), rng.choice((rng.randint(2, 6), rng.randint(4, 8), rng.randint(6, 12)))
    count, most = rng.randint(0, 4), rng.choice((14, 14, 40)) * tasks
    staged = bool(stream.stages)
    faults = sorted((_fault(rng, most, staged) for _ in range(count)), key=lambda fault: fault.after)
    return Scenario(
        seed=seed,
        stream=stream,
        tasks=tasks,
        versions=rng.choice((100, 100, rng.randint(1, 4))),
        workers=rng.choice((1, 1, 2, 3)),
        scorers=len(stream.stages) * rng.choice((1, 1, 2)),
        durable=rng.random() < 0.5,
        spill=rng.random() < 0.5,
        whole=stream.max_staleness == 0,
        checkpoint_every=rng.choice((1, 2, 4, 100)),
        checkpoint_first=rng.random() < 0.8,
        generation_s=rng.choice((0.2, 0.2, 1.0, 4.0)),
        step_s=rng.choice((0.1, 1.0)),
        latency_s=rng.choice((0.002, 0.05, 0.4)),
        max_tokens=rng.choice((3, 100)),
        progress=rng.choice((0.0, 0.0, 0.5)),
        refused=rng.choice((0.0, 0.0, 0.15)),
        bad=_some(rng, tasks, 0.3),
        corrupt=_some(rng, tasks, 0.2),
        evaluations=rng.random() < 0.25,
        files=rng.random() < 0.1,
        faults=tuple(faults),
    )


def _stream(rng: random.Random) -> StreamSettings:
    groups, staleness = rng.choice((1, 1, 2, 3)), rng.randint(0, 3)
    window = rng.randint(1, min(staleness * groups, 4) + 1)
    stages = rng.choice(((), (), (), (SCORER,), (SCORER, CRITIC)))
    added = tuple(column for stage in stages for column in stage.adds)
    return StreamSettings(
        groups_per_version=groups,
        max_staleness=staleness,
        window=window,
        depth=groups + window - 1 + rng.randint(0, 6),
        max_bytes=rng.choice((1, 800, 1 << 20, 1 << 20)),
        lease_s=LEASE_S,
        learners=rng.choice((1, 1, 2, 3)),
        columns=added if rng.random() < 0.8 else (),
        stages=stages,
        wait_share=rng.choice((None, None, 0.1)),
        hedge_s=rng.choice((None, HEDGE_S)),
    )


def _fault(rng: random.Random, most: int, staged: bool) -> Fault:
    kind = rng.choice(FAULTS)
    if (kind == "drain" and rng.random() < 0.7) or (kind == "scorer" and not staged):
        kind = "drop"
    seconds = rng.choice((0.1, 1.0, 7.0, 15.0)) * rng.random()
    return Fault(rng.randint(0, most), kind, rng.choice(CRASH_POINTS), rng.randrange(1000), seconds)


def _some(rng: random.Random, tasks: int, share: float) -> frozenset[int]:
    """One or two ordinals, in this share of the runs."""
    return frozenset(rng.sample(range(tasks), rng.randint(1, 2))) if rng.random() < share else frozenset()
