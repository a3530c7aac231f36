"""Rules about time: which side waits for the other and why, who is slow or silent, and waits that are far too long."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median, quantiles

from asyncrl.observability.doctor.facts import (
    WINDOW_S,
    Finding,
    RunFacts,
    Severity,
    average,
    ended,
    percent,
    versions,
)
from asyncrl.observability.rows import number
from asyncrl.observability.run_files import ALIVE_S, RUNNING
from asyncrl.observability.timeline import ProcessTrace, Span
from asyncrl.observability.times import clock, duration

NAMED = 0.15
"""The share of its time from which on a side that waits is named."""

LEARNER_WAITS, GENERATORS_IDLE = 0.3, 0.7
"""Shares from which on that is a finding. Generators cost nobody's time while the learner works."""

STALL_S, FEW = 10.0, 20
"""A shorter wait is no stall; from fewer waits it is not known how long they usually are."""

LEAVES_S = 5.0
"""A process that leaves writes no row so long before."""

MEANWHILE = ("silent", "ended", "restarted", "left", "fenced", "began again")


def who_waits(facts: RunFacts) -> Finding | None:
    """Which side waits for the other, and why; None while nothing is known."""
    rows, count = facts.recent, facts.key("generator.count", 1)
    waits, busy = average(rows, "perf/wait_fraction/groups"), average(rows, "perf/busy/generator")
    learner, idle = average(rows, "perf/busy/learner"), 0.0 if busy is None else 1.0 - busy
    if waits is None:
        return None
    known = (("learner busy", learner), ("it waits for groups", waits), ("generators busy", busy))
    shares = ", ".join(f"{what} {percent(share)}" for what, share in known if share is not None)
    evidence = f"{versions(rows)}: {shares}"
    if waits >= NAMED:
        who, change = _who_is_slow(facts, idle)
        them = "them" if who.startswith("Generators") else "groups"
        sentence = f"{who} the bottleneck: the learner waits for {them} {percent(waits)} of its time."
        return Finding("warning" if waits >= 0.5 else "note", sentence, evidence, *change, about=who)
    if idle >= NAMED:
        sentence = f"The learner is the bottleneck: generators are idle {percent(idle)} of their time."
        others = facts.generators_of_pools()
        fewer = max(1, math.ceil(1.25 * (count + others) * (1.0 - idle)) - others)
        change = (
            "generator.count",
            str(fewer),
            "fewer generators do as much; or give the learner more devices",
        )
        if fewer >= count:
            key = "learner.micro_batch_tokens"
            change = (key, facts.times(key, 2), "if memory allows; or give the learner more devices")
        return Finding("note", sentence, evidence, *change)
    if learner is None or busy is None:
        return None
    sentence = (
        f"Both sides are busy: the learner {percent(learner)}, generators {percent(busy)} of their time."
    )
    return Finding("note", sentence, evidence, hint="More staleness or depth gains nothing; more devices do")


def bottleneck(facts: RunFacts) -> Iterator[Finding]:
    """Where a side loses so much time that it matters."""
    idle = 1.0 - (average(facts.recent, "perf/busy/generator") or 1.0)
    if facts.average("perf/wait_fraction/groups") >= LEARNER_WAITS or idle >= GENERATORS_IDLE:
        yield from filter(None, [who_waits(facts)])


def _who_is_slow(facts: RunFacts, idle: float) -> tuple[str, tuple[str, str, str]]:
    """For whom groups wait, with its verb; and the key, its value and a hint. idle: share of the generators' time"""
    each, staleness, depth = (
        facts.key(key, default)
        for key, default in (("batch.groups", 64), ("queue.max_staleness", 2), ("queue.depth", None))
    )
    made, scored = facts.seconds("rollouts", "generate"), facts.seconds("rewards", "score")
    turns, acted = facts.seconds("turns"), facts.seconds("environments") or facts.seconds("tools")
    late = facts.average("perf/generator/time/wait/weights") / (facts.average("perf/step_s") or 1.0)
    more, processes = str(facts.key("generator.count", 1) + 1), facts.key("agent.environment_processes", 0)
    waits, slow = idle >= NAMED, next(stragglers(facts), Finding("note", "", ""))
    # fmt: off
    causes = (
        (waits and bool(slow.about), f"{slow.about} is", slow.key, slow.value, slow.hint),
        (facts.average("queue/lacking_columns") >= each / 4, "A pool is",
         "placement", "", "more processes of the pool that groups wait for"),
        (waits and scored > 0.4 * max(made, 1e-9), "Reward functions are",
         "reward.workers", facts.times("reward.workers", 2), "or in a pool: placement.rewards.where=pool"),
        (waits and acted > turns, "Environments or tools are",
         "agent.environment_processes", str(2 * processes or 2), "or more agent.tool_workers"),
        (waits and staleness and late >= NAMED, "Weights on their way are",
         "sync.delta", "always", "less to send; or a faster link"),
        (waits and isinstance(depth, int) and depth < (staleness + 1) * each, "The queue's depth is",
         "queue.depth", "null", "as many groups as the staleness bound allows"),
        (waits, "The staleness bound is",
         "queue.max_staleness", str(staleness + 1), "generators may then work further ahead"),
        (True, "Generators are",
         "generator.count", more, "or more generator.slots, until tokens/s stop growing"),
    )
    # fmt: on
    who, *change = next(cause for holds, *cause in causes if holds)
    return who, (change[0], change[1], change[2])


def stragglers(facts: RunFacts) -> Iterator[Finding]:
    """A generator whose groups take twice as long as those of the others of its pool, and not because it makes more at
    once."""
    lanes = {process.name: ended(lane, facts.since, "generate") for process, lane in facts.lanes("rollouts")}
    made = {name: spans for name, spans in lanes.items() if len(spans) > 2}
    took = {name: median(one.end - one.start for one in spans) for name, spans in made.items()}
    for name, seconds in took.items():
        pool = facts.pool_of(name)
        if not (others := [each for each in took if each != name and facts.pool_of(each) == pool]):
            continue
        usual, groups = median(took[each] for each in others), fmean(len(made[each]) for each in others)
        rate = median(_groups_per_s(made[each]) for each in others)
        if seconds < max(2 * usual, usual + 0.1) or _groups_per_s(made[name]) > rate / 2 or groups < 10:
            continue
        sentence = f"{name} is slow: its groups take {seconds / usual:.1f} times as long as those of others."
        evidence = (
            f"{clock(facts.since)} to {clock(facts.now)}: {len(made[name])} groups of {seconds:.2g} s each, "
            f"others {groups:.0f} of {usual:.2g} s each"
        )
        hint = "others then take what it has had for so long; look at its machine"
        yield Finding(
            "warning", sentence, evidence, "queue.hedge_s", f"{max(1.0, 4 * usual):.2g}", hint, name
        )


def _groups_per_s(spans: Sequence[Span]) -> float:
    """Groups for each second in which one was under way at least: waits for tasks do not count."""
    seconds, reached = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        seconds += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return len(spans) / max(seconds, 1e-9)


def silent(facts: RunFacts) -> Iterator[Finding]:
    """A process of a live run without a sign of life, that neither left nor ended, and is of its present start."""
    gone = {
        str(event.about.get("process")): event.time for event in facts.events("left", "ended", "left_out")
    }
    launchers = (each for each in facts.processes.values() if each.role == "launcher")
    starts = (event.time for each in launchers for event in each.events if event.name == "began again")
    begun = max(starts, default=facts.now - WINDOW_S)
    for process in facts.processes.values():
        since = facts.now - process.last
        if facts.state != RUNNING or since < ALIVE_S or process.last < begun:
            continue
        if gone.get(process.name, 0.0) > process.last - LEAVES_S:
            continue
        sentence = f"{process.name} has been silent for {duration(since)}."
        hint = f"Look at logs/{process.name}.log and at its machine: it is stopped, cut off or gone"
        evidence = f"the last row of its trace: {clock(process.last)}"
        yield Finding("wrong", sentence, evidence, hint=hint, about=process.name)


def stalls(facts: RunFacts) -> Iterator[Finding]:
    """A wait of a loop that is far longer than its other waits of this name, and than versions take."""
    begun, step_s = number(facts.rows[0], "time") or 0.0, facts.average("perf/step_s")
    for process, lane in (pair for name in ("learner", "engine", "pool") for pair in facts.lanes(name)):
        waits: dict[str, list[tuple[float, Span]]] = {}
        for span in [*lane.spans]:
            if span.start >= begun and span.name.startswith("wait/"):
                lasted = process.end_of(span, facts.now) - span.start
                waits.setdefault(span.name.removeprefix("wait/"), []).append((lasted, span))
        for what, each in waits.items():
            seconds, span = max(each, key=lambda pair: pair[0])
            if len(each) < FEW:
                continue
            usual = quantiles([lasted for lasted, one in each if one is not span], n=20)[-1]
            if seconds >= max(STALL_S, 5 * usual, 2 * step_s):
                yield _stall(facts, process, span, f"{duration(seconds)} for {what}", usual)


def _stall(facts: RunFacts, process: ProcessTrace, span: Span, wait: str, usual: float) -> Finding:
    end, goes_on = process.end_of(span, facts.now), math.isnan(span.end) and facts.state == RUNNING
    seen = [event for event in facts.events(*MEANWHILE) if span.start - ALIVE_S <= event.time <= end]
    lines = [
        f"{event.about.get('process', '')} {event.name} {clock(event.time)}".strip() for event in seen[:4]
    ]
    still = [each for each in facts.processes.values() if goes_on and facts.now - each.last > ALIVE_S]
    lines += [f"{each.name} silent since {clock(each.last)}" for each in still]
    sentence = (
        f"{process.name} {'has waited' if goes_on else 'waited'} {wait}, usually less than {usual:.2g} s."
    )
    evidence = "; ".join([f"{clock(span.start)} to {clock(end)}", *lines])
    hint = "Look at what the others did at that time: `asyncrl dash` has their lanes"
    severity: Severity = "warning" if end >= facts.since else "note"
    return Finding(severity, sentence, evidence, hint=hint, about=f"{process.name} {span.name}")
