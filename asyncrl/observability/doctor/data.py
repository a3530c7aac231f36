"""Rules about the data that a run learns from: how stale it is, and whether engine and learner agree on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from asyncrl.observability.doctor.facts import Finding, RunFacts, average, extreme, percent, versions
from asyncrl.observability.rows import Row, number

STEADY, LAST = 10, 5
"""Versions in a row of which a mean is taken: of noisy figures, and of those that blow up."""


def stale_data(facts: RunFacts) -> Iterator[Finding]:
    """Old tokens that hardly count, now or earlier; or that are older than the learner's waits ask for."""
    bound, found = (
        facts.key("queue.max_staleness", 2),
        extreme(facts.rows, "train/effective_sample_size", STEADY, -1),
    )
    if found and found[0] < 0.5:
        size, rows = found
        mean = average(rows, "train/staleness/mean") or 0.0
        sentence = f"The data is too far from the policy: its effective sample size is {percent(size)} of its tokens."
        evidence = f"{versions(rows)}: staleness {mean:.1f} on average, {bound} allowed"
        lower = facts.times("learner.optimizer.lr", 1 / 3)
        change = ("learner.optimizer.lr", lower, "the policy moves too far within a version")
        if bound >= 1 and mean >= 0.5:
            change = ("queue.max_staleness", str(bound // 2), "or a lower learner.optimizer.lr")
        yield Finding("wrong" if size < 0.2 else "warning", sentence, evidence, *change, about="size")
    near, waits = _near_the_bound(facts, bound), facts.average("perf/wait_fraction/groups")
    queued = facts.average("train/staleness/in_queue") > facts.average("train/staleness/mean") / 2
    if bound >= 4 and near >= 0.8 and waits < 0.05 and queued and not facts.key("queue.wait_share", 0):
        sentence = (
            "Data is older than it needs to be: it waits in the queue, and the learner hardly ever for it."
        )
        evidence = (
            f"{versions(facts.recent)}: {percent(near)} of the groups near the bound of {bound} versions"
        )
        hint = "about the same speed on fresher data"
        yield Finding("note", sentence, evidence, "queue.wait_share", "0.05", hint, "age")


def _near_the_bound(facts: RunFacts, bound: int) -> float:
    """The share of groups claimed of late whose age is three quarters of the bound or more."""
    ages = Counter[int]()
    for event in facts.events("claim"):
        each = event.about.get("ages")
        if event.time >= facts.since and isinstance(each, dict):
            ages.update({int(age): n for age, n in each.items() if age.isdecimal() and isinstance(n, int)})
    return sum(count for age, count in ages.items() if age >= 0.75 * bound) / max(1, ages.total())


def mismatch(facts: RunFacts) -> Iterator[Finding]:
    """Log-probs of fresh tokens that differ between engine and learner."""
    half = facts.key("model.dtype", "float32") == "bfloat16"
    loose = half or facts.key("generator.quantization", None) is not None
    bound = facts.key("learner.logprob_gate.mean", 0.1 if loose else 0.001)
    change = (
        "",
        "",
        "The engine has other weights or computes less exactly: look at sync.verify and its dtype",
    )
    if half:
        change = (
            "model.head_dtype",
            "float32",
            "or a wider learner.logprob_gate, for an engine of fewer bits",
        )
    for event in facts.events("logprob_mismatch")[-1:]:
        sentence = "Engine and learner disagree on log-probs of fresh tokens, beyond learner.logprob_gate."
        evidence = ", ".join(f"{name} {about}" for name, about in event.about.items())
        yield Finding("wrong", sentence, f"last at {evidence}", *change, about="gate")
    for of in ("train", "probe"):
        if (gap := facts.average(f"train/logprob_gap/{of}/mean")) > bound / 2:
            sentence = f"Engine and learner differ by {gap:.2g} on log-probs of fresh tokens."
            evidence = f"{versions(facts.recent)}: mean over tokens of {of}; the gate allows {bound:g}"
            yield Finding("warning", sentence, evidence, *change, about=of)


def divergence(facts: RunFacts) -> Iterator[Finding]:
    """A KL that blows up, over the whole run."""
    for key, floor in (("train/approx_kl", 0.1), ("train/kl/reference", 1.0)):
        first = average(facts.rows[1 : len(facts.rows) // 4], key)
        worst = extreme(facts.rows, key, LAST)
        if first is not None and worst and worst[0] > max(floor, 5 * first):
            sentence = f"KL blows up: {key} is {worst[0]:.2g}, after {first:.2g} at first."
            lower, hint = facts.times("learner.optimizer.lr", 1 / 3), "or a lower queue.max_staleness"
            yield Finding(
                "wrong", sentence, versions(worst[1]), "learner.optimizer.lr", lower, hint, about=key
            )


def long_groups_late(facts: RunFacts) -> Iterator[Finding]:
    """Groups that finish first are short: long rollouts are trained on later, at a higher age."""
    ages: dict[bool, list[float]] = {False: [], True: []}
    rows = [row for row in facts.rollouts if number(row, "tokens") and _made_by(row)][-400:]
    for row in rows:
        ages[(number(row, "version") or 0) - 1 - min(_made_by(row)) >= 2].append(number(row, "tokens") or 0.0)
    young, old = ages.values()
    if min(len(young), len(old)) < 20 or fmean(old) < 1.5 * fmean(young):
        return
    sentence = "Long rollouts are trained on later than short ones: lengths of a version depend on who finished first."
    evidence = (
        f"{versions(rows)}: {fmean(young):.0f} tokens at an age of up to 1, {fmean(old):.0f} at 2 or more"
    )
    hint = "groups are then trained in the order of their tasks, and the learner waits for long ones"
    yield Finding("note", sentence, evidence, "queue.window", "1", hint)


def _made_by(row: Row) -> list[int]:
    """The versions that made a rollout; none in a row that is damaged."""
    found = row.get("versions")
    return [each for each in found if isinstance(each, int)] if isinstance(found, list) else []
