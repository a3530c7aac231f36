"""Rules about what is lost on the way: processes that die, tasks that are dropped, numbers that are not finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from asyncrl.observability.doctor.facts import Finding, RunFacts, Severity, percent, versions
from asyncrl.observability.rows import number
from asyncrl.observability.run_files import RUNNING, SILENT
from asyncrl.observability.times import clock

DROPPED, FILTERED, END = "queue/dropped/", "filtered", "end"
SMALL, LARGE = 0.02, 0.2
"""Shares of the tasks from which on drops are a warning, and wrong."""

# fmt: off
REMEDIES = {
    "reward": ("reward.function", "", "the log of a generator has the error"),
    "too_long": ("tasks.max_prompt_tokens", "", "shorter prompts, or a larger generator.max_length"),
    "engine": ("generator.slots", "", "fewer take less memory; the log of a generator has the error"),
    "environment": ("agent.environment_retries", "2", "the log of a generator has the error"),
    "not_finite": ("learner.optimizer.lr", "", "a lower one; groups/ has what was dropped"),
    "fenced": ("queue.lease_s", "60", "leases end while their workers are alive"),
    "stale": ("generator.kv", "drain", "groups have older tokens than their leases permit"),
}
# fmt: on
"""Reasons of drops and refusals: the key, its value, and a hint."""

GOES_ON = (RUNNING, SILENT)
FINITE = ("train/loss", "train/grad_norm", "rollout/reward/mean")


def restarts(facts: RunFacts) -> Iterator[Finding]:
    """Processes that ended on an error or a signal; of a run that has ended in order, before its last version."""
    over = number(facts.rows[-1], "time") or 0.0 if facts.rows and facts.state not in GOES_ON else math.inf
    left_out = {str(event.about.get("process")) for event in facts.events("left_out")}
    died = [event for event in facts.events("ended") if event.about.get("code") and event.time <= over]
    last = {str(event.about.get("process")): event for event in died}
    for name, count in Counter(str(event.about.get("process")) for event in died).items():
        how = last[name].about.get("signal") or f"exit code {last[name].about['code']}"
        times, out = "once" if count == 1 else f"{count} times", " and is left out" * (name in left_out)
        cause = f": {facts.causes[name]}" if facts.causes.get(name) else ""
        hint = f"Look at logs/{name}.log" + "; it is often memory that was short" * (how == "SIGKILL")
        evidence = f"last at {clock(last[name].time)} by {how}{cause}"
        severity: Severity = "wrong" if out else "warning"
        yield Finding(severity, f"{name} has died {times}{out}.", evidence, hint=hint, about=name)


def drops(facts: RunFacts) -> Iterator[Finding]:
    """Tasks that were dropped, and groups that the queue refused, by reason."""
    row = facts.rows[-1]
    trained = number(row, "queue/trained") or 0.0
    for key in row:
        count, reason = number(row, key) or 0.0, key.removeprefix(DROPPED)
        share = count / max(1.0, count + trained)
        evidence = f"version {row['version']}: {count:.0f} dropped, {trained:.0f} trained"
        if key == DROPPED + FILTERED and share > 0.8:
            sentence = (
                f"The filter drops {percent(share)} of the groups: most work of generators is thrown away."
            )
            hint = "Tasks that are neither solved nor hopeless"
            yield Finding("note", sentence, evidence, hint=hint, about=reason)
        elif key.startswith(DROPPED) and reason not in (FILTERED, END) and share > SMALL:
            sentence, remedy = (
                f"{percent(share)} of the tasks are dropped, for {reason}.",
                REMEDIES.get(reason, ("", "", "")),
            )
            yield Finding("wrong" if share > LARGE else "warning", sentence, evidence, *remedy, about=reason)
    refused = Counter[str]()
    for process in (each for each in facts.processes.values() if each.role == "queue"):
        for event in (each for each in [*process.events] if each.name == "refused"):
            count = event.about.get("count", 1)
            refused[str(event.about.get("reason"))] += count if isinstance(count, int) else 1
    for reason, number_refused in refused.items():
        if reason in REMEDIES and number_refused > max(5.0, SMALL * trained):
            sentence = f"The queue has refused {number_refused} groups, for {reason}."
            yield Finding(
                "warning", sentence, f"{trained:.0f} trained", *REMEDIES[reason], about=f"refused {reason}"
            )


def not_finite(facts: RunFacts) -> Iterator[Finding]:
    """Losses, gradients and rewards with NaN or infinity."""
    bad = {key: [row for row in facts.rows if key in row and row[key] is None] for key in FINITE}
    for key, rows in bad.items():
        if rows:
            sentence = f"{key} is not finite at {len(rows)} of {len(facts.rows)} versions."
            lower, hint = facts.times("learner.optimizer.lr", 1 / 3), "or a lower learner.optimizer.grad_clip"
            yield Finding("wrong", sentence, versions(rows), "learner.optimizer.lr", lower, hint, key)
