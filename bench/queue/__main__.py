"""python -m bench.queue: see the package."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.bars import figures
from bench.output import bench_parser, machine, write_results
from bench.queue import limits, report
from bench.queue.load import DEPTH, Load
from bench.queue.runner import System, absent, hops, rates
from bench.queue.soak import soak
from bench.queue.systems import SYSTEMS, WHAT

HOP = Load(groups=500, tokens=512, pace_s=0.02)
"""Of any scale: a p99 of 100 hops would be the longest of them."""


def main() -> None:
    args = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="queue-", dir=args.dir) as folder:
        if args.soak:
            write_results(args.json, soak(args.clients, int(args.gigabytes * 1e9), Path(folder)))
        else:
            compare(args, Path(folder))


def compare(args: argparse.Namespace, folder: Path) -> None:
    chosen = [system for system in SYSTEMS if system.name in args.systems]
    missing = {system.name: why for system in chosen if (why := absent(system))}
    there = [system for system in chosen if system.name not in missing]
    repetitions = [_repetition(there, args, folder, missing) for _ in range(args.repetitions)]
    found = figures(repetitions, report.BARS, report.BESIDE)
    names = {system.name: WHAT[system.name] for system in chosen}
    text = report.table(names, found, missing, machine(), len(repetitions))
    print(text)
    result = {"figures": found, "absent": missing, "machine": machine(), "repetitions": repetitions}
    write_results(args.json, result, args.table, text)


def _repetition(
    systems: Sequence[System], args: argparse.Namespace, folder: Path, missing: dict[str, str]
) -> dict[str, float]:
    """Every system once. One that fails is as absent from then on."""
    found = {
        "memcpy_mb_per_s": limits.memcpy_mb_per_s(),
        "disk_mb_per_s": limits.disk_mb_per_s(folder),
        "ledger_transitions_per_s": limits.ledger_transitions_per_s(),
    }
    loads = [*args.tokens, None]
    for tokens in loads:
        for system in systems:
            if system.name in missing:
                continue
            try:
                one = _hop(system, folder) if tokens is None else _rate(system, tokens, args, folder)
            except RuntimeError as error:
                missing[system.name] = f"failed: {str(error).strip().splitlines()[-1]}"
                print(f"{system.name}: {error}", flush=True)
                continue
            print("  ".join(f"{name} {value:,.4g}" for name, value in one.items()), flush=True)
            found |= one
    return found


def _rate(system: System, tokens: int, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    load = Load(max(4 * DEPTH, int(system.groups[tokens] * args.scale)), tokens)
    return {f"{name}.{system.name}.{tokens}": value for name, value in rates(system, load, folder).items()}


def _hop(system: System, folder: Path) -> dict[str, float]:
    return {f"{name}.{system.name}": value for name, value in hops(system, HOP, folder).items()}


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("queue", "The transfer queue beside others.")
    parser.add_argument(
        "--dir", type=Path, help="where journals go: on the disk to be measured (default: temporary)"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 8192], choices=[512, 8192])
    parser.add_argument("--systems", nargs="+", default=list(WHAT), choices=list(WHAT), metavar="SYSTEM")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="of the number of groups that are streamed (default: %(default)s)",
    )
    parser.add_argument(
        "--soak", action="store_true", help="many clients and bytes instead; nothing may be lost"
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--gigabytes", type=float, default=20)
    return parser


if __name__ == "__main__":
    main()
