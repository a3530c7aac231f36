"""python -m bench.chaos: see the package.

    python -m bench.chaos --faults kill,disk --seed 3 --json runs/bench/chaos.json

Trains the recipe twice, undisturbed and under faults. They must cost time only: the run reaches the bar, every
task ends once, no group is too old, no version is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from bench.chaos.faults import KINDS
from bench.chaos.runs import FaultyRun, Outcome
from bench.chaos.verdict import broken, figures, table
from bench.output import machine, write_results


def main() -> int:
    args = _parser().parse_args()
    report: dict[str, Any] = {
        "machine": machine(),
        "every_s": args.every,
        "kinds": args.faults,
        "seed": args.seed,
    }
    if not args.no_comparison:
        report["undisturbed"] = figures(_live(args, "undisturbed", []))
    outcome = _live(args, "faults", args.faults)
    report["faults"] = figures(outcome)
    wrong = broken(outcome, load_config(args.config, args.overrides).queue.max_staleness)
    if accuracy(outcome) < args.bar:
        wrong.append(f"accuracy {accuracy(outcome):.1%} is below the bar of {args.bar:.1%}")
    print(table(report))
    print("\n".join(["WRONG", *wrong] if wrong else ["every invariant holds"]))
    write_results(args.json, report)
    return 1 if wrong else 0


def accuracy(outcome: Outcome) -> float:
    """Greedy, on held-out tasks, of the last evaluation."""
    return outcome.summary.get("heldout_accuracy_end") or 0.0


def _live(args: argparse.Namespace, name: str, kinds: list[str]) -> Outcome:
    words = [f"run.name=chaos-{name}", f"run.dir={args.dir}", *args.overrides]
    return FaultyRun(args.config, words, kinds, args.every, args.seed, args.most).live()


def kinds_of(text: str) -> list[str]:
    """
    >>> kinds_of("kill,cut")
    ['kill', 'cut']
    """
    kinds = text.split(",")
    if unknown := sorted({*kinds} - {*KINDS}):
        raise argparse.ArgumentTypeError(
            f"no kinds of faults: {', '.join(unknown)}; there are {', '.join(KINDS)}"
        )
    return kinds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the recipe")
    parser.add_argument("--config", default="configs/recipes/demo.yaml")
    parser.add_argument("--dir", default="runs", help="where the run folders go")
    parser.add_argument(
        "--faults",
        type=kinds_of,
        default=[*KINDS],
        help=f"kinds, with commas between them (default: {','.join(KINDS)}; with redis, the journal is there)",
    )
    parser.add_argument(
        "--every",
        type=float,
        default=5.0,
        help="seconds from one fault to the next, on average, once a new version has come (%(default)s)",
    )
    parser.add_argument("--most", type=int, help="no faults beyond so many")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the faults; the same one draws the same again"
    )
    parser.add_argument("--no-comparison", action="store_true", help="leave the undisturbed run out")
    parser.add_argument(
        "--bar", type=float, default=0.95, help="held-out accuracy to be reached (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
