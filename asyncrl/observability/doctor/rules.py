"""All rules, and the diagnosis that they come to.

RunFiles ── RunFacts ──▸ RULES, each where a run has enough to judge by ──▸ findings, the worst first
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from asyncrl.observability.doctor import data, lost, outcome, speed
from asyncrl.observability.doctor.facts import SEVERITIES, Finding, RunFacts
from asyncrl.observability.doctor.limits import limits
from asyncrl.observability.run_files import RunFiles


@dataclass(frozen=True, slots=True)
class DoctorRule:
    """looks_at: in a few words · versions: rows below which it is silent · traces: whether it looks at nothing else"""

    name: str
    looks_at: str
    check: Callable[[RunFacts], Iterator[Finding]]
    versions: int = 1
    traces: bool = False

    def applies(self, facts: RunFacts) -> bool:
        return len(facts.rows) >= self.versions and (bool(facts.processes) or not self.traces)


RULES = (
    DoctorRule("bottleneck", "who waits for whom, and why", speed.bottleneck, 6),
    DoctorRule("straggler", "how long a group takes each generator", speed.stragglers, 3, traces=True),
    DoctorRule("silent", "signs of life of each process", speed.silent, 0, traces=True),
    DoctorRule("stall", "waits far longer than usual", speed.stalls, 3, traces=True),
    DoctorRule("stale data", "staleness and effective sample size", data.stale_data, 6),
    DoctorRule("mismatch", "log-probs of engine and learner", data.mismatch),
    DoctorRule("divergence", "KL", data.divergence, 15),
    DoctorRule("length bias", "lengths of fresh and old rollouts", data.long_groups_late, 6),
    DoctorRule("nothing to learn", "groups of equal rewards", outcome.nothing_to_learn, 10),
    DoctorRule("collapse", "entropy", outcome.collapse, 15),
    DoctorRule("reward falls", "the reward against its best", outcome.reward_falls, 30),
    DoctorRule("hacked reward", "the reward against held-out scores", outcome.hacked_reward, 15),
    DoctorRule("one part", "parts of the reward", outcome.one_part, 15),
    DoctorRule("lengths", "how rollouts grow", outcome.lengths, 10),
    DoctorRule("limits", "clipping, truncation, waits of the learner, weights, failed rewards", limits, 6),
    DoctorRule("restarts", "processes that died", lost.restarts, 0, traces=True),
    DoctorRule("drops", "tasks dropped and groups refused, by reason", lost.drops),
    DoctorRule("not finite", "losses, gradients and rewards", lost.not_finite),
)


def diagnose(run: RunFiles, logs: bool = True) -> list[Finding]:
    """logs: whether they are looked into for causes"""
    return findings(RunFacts.of(run, logs))


def findings(facts: RunFacts) -> list[Finding]:
    """Those of all rules, the worst first."""
    found = [finding for rule in RULES if rule.applies(facts) for finding in _of(rule, facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _of(rule: DoctorRule, facts: RunFacts) -> list[Finding]:
    """The files of a run may hold anything: a rule that fails on them must not take the others with it."""
    try:
        return [replace(finding, rule=rule.name) for finding in rule.check(facts)]
    except Exception as error:
        sentence = f"The rule about {rule.looks_at} cannot judge this run."
        hint = "A file of the run has values of another kind than a run writes"
        evidence = f"{type(error).__name__}: {str(error)[:200]}"
        return [Finding("note", sentence, evidence, hint=hint, rule=rule.name)]
