"""python -m bench.chaos: see the package.

    make demo && python -m bench.chaos --json runs/bench/chaos.json

Trains the recipe twice, undisturbed and with a SIGKILL to a random one of its processes some seconds after the run has
come back from the one before. The kills must cost time only: the run reaches the bar, and every task ends once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.chaos.history import History
from bench.chaos.runs import KilledRun, Outcome
from bench.output import machine, write_results


def main() -> int:
    args = _parser().parse_args()
    outcomes = {
        name: KilledRun(
            args.config, [f"run.name=chaos-{name}", f"run.dir={args.dir}", *args.overrides], every, args.seed
        ).live()
        for name, every in {"undisturbed": None, "killed": args.every}.items()
    }
    report = {
        "machine": machine(),
        "every_s": args.every,
        **{name: figures(outcome) for name, outcome in outcomes.items()},
    }
    print(table(report))
    write_results(args.json, report)
    killed = outcomes["killed"]
    return 0 if sound(killed.history) and accuracy(killed) >= args.bar else 1


def sound(history: History) -> bool:
    """Whether every task has ended, and none of them twice."""
    return not history.unended and not history.twice


def accuracy(outcome: Outcome) -> float:
    """Greedy, on held-out tasks, of the last evaluation."""
    return outcome.summary.get("heldout_accuracy_end") or 0.0


def figures(outcome: Outcome) -> dict[str, Any]:
    history, summary = outcome.history, outcome.summary
    return {
        "seconds": outcome.seconds,
        "accuracy": summary.get("heldout_accuracy_end"),
        "versions": summary["versions"],
        "groups_trained": summary["groups_trained"],
        "staleness_max": summary["staleness"]["max"],
        "tasks": {"ended": len(history.ends), "twice": len(history.twice), "not": len(history.unended)},
        "kills": dict(outcome.kills),
        "restarts": outcome.restarts,
        "load": outcome.load,
    }


def table(report: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{report['machine']} Killed again after {report['every_s']:g} s of new versions, on average"]
    lines += [f"{'':20}{'undisturbed':>16}{'killed':>16}"]
    rows = {
        "seconds": lambda run: f"{run['seconds']:.0f}",
        "accuracy": lambda run: "none" if run["accuracy"] is None else f"{run['accuracy']:.1%}",
        "versions": lambda run: str(run["versions"]),
        "staleness, most": lambda run: str(run["staleness_max"]),
        "tasks ended once": lambda run: str(run["tasks"]["ended"] - run["tasks"]["twice"]),
        "twice, or not": lambda run: str(run["tasks"]["twice"] + run["tasks"]["not"]),
        "restarts": lambda run: str(run["restarts"]),
        "load": lambda run: f"{run['load']:.1f}",
    }
    for label, text in rows.items():
        lines.append(f"{label:20}{text(report['undisturbed']):>16}{text(report['killed']):>16}")
    kills = ", ".join(f"{party} {count}" for party, count in sorted(report["killed"]["kills"].items()))
    return "\n".join([*lines, f"kills: {kills or 'none'}"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the recipe")
    parser.add_argument("--config", default="configs/recipes/demo.yaml")
    parser.add_argument("--dir", default="runs", help="where the run folders go")
    parser.add_argument(
        "--every",
        type=float,
        default=10.0,
        help="seconds from the first new version after a kill to the next kill, on average (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument(
        "--bar", type=float, default=0.95, help="held-out accuracy to be reached (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
