"""What must hold for a run with faults, its figures, and its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.chaos.faults import KINDS, Fault
from bench.chaos.runs import Outcome


def broken(outcome: Outcome, max_staleness: int) -> list[str]:
    """The invariants that do not hold, in words; none: all hold."""
    history, rows = outcome.history, outcome.rows
    versions = [row["version"] for row in rows]
    stalest = max((row["train/staleness/max"] for row in rows), default=0)
    checks = {
        f"tasks ended twice: {history.twice[:5]}": history.twice,
        f"tasks did not end: {history.unended[:5]}": history.unended,
        f"staleness {stalest:g} is above the bound of {max_staleness}": stalest > max_staleness,
        f"versions with gaps, or twice: {versions}": versions != list(range(1, len(versions) + 1)),
        f"{len(history.trained)} tasks were trained, the learner counts {outcome.summary['groups_trained']:g}": len(
            history.trained
        )
        != outcome.summary["groups_trained"],
    }
    return [words for words, wrong in checks.items() if wrong]


def figures(outcome: Outcome) -> dict[str, Any]:
    """For the JSON file."""
    history, summary = outcome.history, outcome.summary
    return {
        "seconds": outcome.seconds,
        "accuracy": summary.get("heldout_accuracy_end"),
        "reward": summary.get("reward_end"),
        "versions": summary["versions"],
        "groups_trained": summary["groups_trained"],
        "staleness_max": summary["staleness"]["max"],
        "longest_pause_s": outcome.longest_pause_s,
        "tasks": {"ended": len(history.ends), "twice": len(history.twice), "not": len(history.unended)},
        "dropped": dict(Counter(history.dropped.values())),
        "restarts": outcome.restarts,
        "failovers": outcome.failovers,
        "corrupted_bytes": dict(outcome.corrupted),
        "refused": dict(outcome.refused),
        "by_fault": by_fault(outcome.faults),
        "load": outcome.load,
    }


def by_fault(faults: Sequence[Fault]) -> dict[str, dict[str, float]]:
    """Kind and who was struck → how often, the longest and the median pause without a new version."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        for struck in sorted({fault.struck for fault in faults if fault.kind == kind}):
            these = [fault for fault in faults if (fault.kind, fault.struck) == (kind, struck)]
            pauses = [fault.pause_s for fault in these if fault.pause_s is not None] or [0.0]
            found[f"{kind} {struck}"] = {
                "count": len(these),
                "longest_s": max(pauses),
                "median_s": median(pauses),
                "resumed": sum(fault.resumed for fault in these),
            }
    return found


def table(report: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{report['machine']} A fault {report['every_s']:g} s after the one before, on average"]
    rows = {
        "seconds": lambda run: f"{run['seconds']:.0f}",
        "accuracy": lambda run: "none" if run["accuracy"] is None else f"{run['accuracy']:.1%}",
        "versions": lambda run: f"{run['versions']:g}",
        "staleness, most": lambda run: f"{run['staleness_max']:g}",
        "longest without version": lambda run: f"{run['longest_pause_s']:.1f} s",
        "tasks ended once": lambda run: str(run["tasks"]["ended"] - run["tasks"]["twice"]),
        "twice, or not": lambda run: str(run["tasks"]["twice"] + run["tasks"]["not"]),
        "restarts": lambda run: str(run["restarts"]),
        "failovers of Redis": lambda run: str(run["failovers"]),
        "load": lambda run: f"{run['load']:.1f}",
    }
    both = [report[name] for name in ("undisturbed", "faults") if name in report]
    lines.append(f"{'':24}" + "".join(f"{name:>16}" for name in ("undisturbed", "with faults")[-len(both) :]))
    for label, text in rows.items():
        lines.append(f"{label:24}" + "".join(f"{text(run):>16}" for run in both))
    struck = report["faults"]
    lines += ["", f"{'fault':32}{'count':>7}{'median':>9}{'longest':>9}{'resumed':>9}"]
    for name, one in struck["by_fault"].items():
        pauses = f"{one['median_s']:>7.1f} s{one['longest_s']:>7.1f} s"
        lines.append(f"{name:32}{one['count']:>7}{pauses}{one['resumed']:>9}")
    for what in ("corrupted_bytes", "refused", "dropped"):
        counts = ", ".join(f"{name} {count}" for name, count in sorted(struck[what].items()))
        lines.append(f"{what.replace('_', ' ')}: {counts or 'none'}")
    return "\n".join(lines)
